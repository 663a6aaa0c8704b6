"""Unsupported: a name that other projects document and asyncllm does not implement, with its neutral values.

Such a name is accepted with a neutral value, which changes nothing, and refused with any other by a message that names
the alternative. The server has a table for body fields (`server.request.unsupported`), `lmdeploy_settings` one for
settings.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Unsupported"]


class Unsupported(msgspec.Struct, frozen=True):
    """The accepted values of a name that is not implemented."""

    peers: str
    """The projects that document the name."""
    values: tuple[Any, ...] | None
    """Values that change nothing; None always does. None in place of the tuple: any value changes nothing."""
    why: str
    """Why other values are refused, and what to use; if any value is neutral, why it makes no difference."""

    def takes(self, value: Any) -> bool:
        """Return whether the value changes nothing."""
        return self.values is None or value is None or any(_is_same(value, each) for each in self.values)


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether a value equals the neutral one, perhaps as another type: 1.0 and "1" equal 1."""
    if isinstance(neutral, (bool, int, float)) and isinstance(value, (bool, int, float, str)):
        try:
            return bool(msgspec.convert(value, type(neutral), strict=False) == neutral)
        except msgspec.ValidationError:
            return False
    return type(value) is type(neutral) and bool(value == neutral)
