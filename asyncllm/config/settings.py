"""Settings: a validated, immutable group of settings, which every config is.

Constructors do not validate, as in msgspec; code that takes a config calls `checked()` on it, which does.
"""

from __future__ import annotations

import re
import reprlib
import typing
from typing import Any, Self, TypeVar

import msgspec

from asyncllm.errors import InvalidParameter

__all__ = ["MAX_COUNT", "Settings", "checked"]

MAX_COUNT = 2**31 - 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A validated, immutable group of settings."""

    def checked(self) -> Self:
        """Return this config if every field holds, else raise InvalidParameter or UnsupportedFeature."""
        fields = msgspec.structs.asdict(self)
        checked = self.from_dict(fields)
        checked._check()
        return checked

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Build from plain data. Raises InvalidParameter for unknown fields, wrong types and values out of range."""
        for name in fields:
            if name not in cls.__struct_fields__:
                known = ", ".join(sorted(cls.__struct_fields__))
                raise InvalidParameter(f"{cls.__name__} has no field {name!r}. Its fields are: {known}.", name)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            found = re.search(r"\$\.(\w+)", where)
            param = found[1] if found else None
            given = f" (given: {reprlib.repr(fields[param])})" if param in fields else ""
            if what.startswith("Invalid enum value") and param in fields:
                choices = ", ".join(map(repr, _choices(typing.get_type_hints(cls)[param])))
                given = f"{given}. It is one of {choices}"
            raise InvalidParameter(f"{cls.__name__}.{param}: {what}{given}.", param) from None

    def _check(self) -> None:
        """Check rules across fields."""

    def _check_texts(self, *names: str) -> None:
        """Raise InvalidParameter for a text, or a list with one, that is no valid Unicode."""
        for name in names:
            value = getattr(self, name)
            for text in [value] if isinstance(value, str) else value or ():
                if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                    raise InvalidParameter(
                        f"{name} holds a lone surrogate in {reprlib.repr(text)}, which is no valid Unicode. Decode the "
                        f"input with the right encoding, or replace the character.",
                        name,
                    )


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, by itself or beside None."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in _choices(part))


Config = TypeVar("Config", bound=Settings)


def checked(cls: type[Config], value: Config | None, name: str) -> Config:
    """Return the argument `name` of a call if it holds; the default for None. Raises InvalidParameter."""
    if value is None:
        return cls()
    if not isinstance(value, cls):
        raise InvalidParameter(f"{name} must be a {cls.__name__}, not {type(value).__name__}.", name)
    return value.checked()
