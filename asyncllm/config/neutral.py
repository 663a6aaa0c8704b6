"""Neutral: a name that other projects document and asyncllm does not implement, with the values that change nothing.

With a neutral value such a name is accepted; with any other it is refused, in a sentence that says what to use. The
server has a table for the fields of bodies (`server.request.neutral`), `lmdeploy_settings` one for settings.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Neutral"]


class Neutral(msgspec.Struct, frozen=True):
    """The accepted values of a name that is not implemented."""

    peers: str
    """The projects that document the name."""
    values: tuple[Any, ...] | None
    """Values that change nothing; None always does. None in place of the values: any value changes nothing."""
    why: str
    """Why other values are refused, and what to do; for any value, why it makes no difference."""

    def takes(self, value: Any) -> bool:
        """Return whether the value changes nothing."""
        return self.values is None or value is None or any(_is_same(value, each) for each in self.values)


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether a value is the neutral one, perhaps of another type: 1.0 and "1" for 1."""
    if isinstance(neutral, (bool, int, float)) and isinstance(value, (bool, int, float, str)):
        try:
            return bool(msgspec.convert(value, type(neutral), strict=False) == neutral)
        except msgspec.ValidationError:
            return False
    return type(value) is type(neutral) and bool(value == neutral)
