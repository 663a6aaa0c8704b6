"""Options of an image in a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.errors import InvalidParameter, short

__all__ = ["is_low", "refuse_options"]


def is_low(options: Mapping[str, Any]) -> bool:
    """Return whether `detail` is "low", which asks for a single tile. Raises InvalidParameter for an unknown value."""
    detail = options.get("detail", "auto")
    if detail not in ("auto", "low", "high"):
        raise InvalidParameter(f"detail={short(detail)} is none of 'auto', 'low' and 'high'.", "messages")
    return bool(detail == "low")


def refuse_options(options: Mapping[str, Any], *known: str, one_picture: bool = False) -> None:
    """Raise InvalidParameter for options of an image that the family does not have. Every family accepts the `detail`
    values "auto" and "high", since one without a choice always uses full detail, and "low" if that is one picture."""
    details = ("auto", "high", "low") if one_picture else ("auto", "high")
    for name, value in options.items():
        if name not in known and not (name == "detail" and value in details):
            raise InvalidParameter(
                f"{name}={short(value)}: this model's images have no such choice. Leave it out.", "messages"
            )
