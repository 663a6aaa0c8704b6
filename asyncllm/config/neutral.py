"""Names that others document and asyncllm does not implement, each with the values that ask for nothing.

With one of its neutral values such a name is taken, as nothing would be different without it; with any other it is
refused, in a sentence that says what to use. The server has a table for the fields of bodies; the one of settings is
in `lmdeploy_settings`.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Neutral"]


class Neutral(msgspec.Struct, frozen=True):
    """What may be said under a name that is not implemented."""

    peers: str
    """Those in whose documents the name stands."""
    values: tuple[Any, ...] | None
    """What asks for nothing beyond the default, as None always does; None: any value, as nothing could show it."""
    why: str
    """Why other values are refused, and what to do; for any value, why it makes no difference."""

    def takes(self, value: Any) -> bool:
        """Return whether the value asks for nothing."""
        return self.values is None or value is None or any(_is_same(value, each) for each in self.values)


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether it is the neutral value, perhaps mistyped as a field of that type may be: 1.0 and "1" for 1."""
    if isinstance(neutral, (bool, int, float)) and isinstance(value, (bool, int, float, str)):
        try:
            return bool(msgspec.convert(value, type(neutral), strict=False) == neutral)
        except msgspec.ValidationError:
            return False
    return type(value) is type(neutral) and bool(value == neutral)
