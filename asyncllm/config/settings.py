"""Settings: the base of every config, a validated, immutable group of settings.

Constructors check names only, as in msgspec. Code that takes a config calls `checked()` on it, which checks values.
"""

from __future__ import annotations

import re
import reprlib
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from asyncllm.config.lmdeploy_settings import without_unsupported
from asyncllm.config.unsupported import Unsupported
from asyncllm.errors import InvalidParameter

__all__ = ["MAX_COUNT", "Settings", "check_address", "checked", "choices"]

MAX_COUNT = 2**31 - 1


class _CheckedNames(msgspec.StructMeta):
    """Passes the keywords of a constructor through `own_fields`."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return super().__call__(*args, **cls.own_fields(fields))  # type: ignore[attr-defined]


class Settings(msgspec.Struct, metaclass=_CheckedNames, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A validated, immutable group of settings."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = MappingProxyType({})
    """LMDeploy's names without a counterpart here."""

    @classmethod
    def own_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return `fields` under this class's names, without unsupported ones.

        Raises InvalidParameter for unknown names, and UnsupportedFeature for settings that are not implemented.
        """
        own = without_unsupported(cls.UNSUPPORTED, fields)
        for name in own:
            if name not in cls.__struct_fields__:
                nearest = get_close_matches(str(name), cls.__struct_fields__, n=1)
                hint = f"Did you mean {nearest[0]}? " if nearest else ""
                known = ", ".join(sorted(cls.__struct_fields__))
                raise InvalidParameter(f"{cls.__name__} has no field {name!r}. {hint}Its fields are: {known}.", name)
        return own

    def checked(self) -> Self:
        """Return this config. Raises InvalidParameter or UnsupportedFeature unless every field is valid."""
        checked = self._converted(msgspec.structs.asdict(self))
        checked._check()
        return checked

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Build from plain data. Raises like `own_fields`, and InvalidParameter for wrong types and values out of
        range."""
        return cls._converted(cls.own_fields(fields))

    @classmethod
    def _converted(cls, fields: dict[str, Any]) -> Self:
        """Build from this class's own fields. Raises InvalidParameter for wrong types and values out of range."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            found = re.search(r"\$\.(\w+)", where)
            param = found[1] if found else None
            given = f" (given: {reprlib.repr(fields[param])})" if param in fields else ""
            if what.startswith("Invalid enum value") and param in fields:
                known = ", ".join(map(repr, choices(typing.get_type_hints(cls)[param])))
                given = f"{given}. It is one of {known}"
            raise InvalidParameter(f"{cls.__name__}.{param}: {what}{given}.", param) from None

    def _check(self) -> None:
        """Check rules that involve several fields."""

    def _check_texts(self, *names: str) -> None:
        """Raise InvalidParameter if a text, alone or in a list, is not valid Unicode."""
        for name in names:
            value = getattr(self, name)
            for text in [value] if isinstance(value, str) else value or ():
                if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                    raise InvalidParameter(
                        f"{name} holds a lone surrogate in {reprlib.repr(text)}, which is not valid Unicode. Decode "
                        f"the input with the right encoding, or replace the character.",
                        name,
                    )


def choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, also of one that is optional."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for part in typing.get_args(annotation) for choice in choices(part))


def check_address(address: str | None, name: str) -> None:
    """Raise InvalidParameter if the setting `name` is not an address of a server."""
    if address is not None and not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", address):
        raise InvalidParameter(
            f"{name} holds {reprlib.repr(address)}, which is not the address of a server. Write it as http://host:port.",
            name,
        )


Config = TypeVar("Config", bound=Settings)


def checked(cls: type[Config], value: Config | None, name: str) -> Config:
    """Return the argument `name` of a call, checked, or the default if it is None. Raises InvalidParameter."""
    if value is None:
        return cls()
    if not isinstance(value, cls):
        raise InvalidParameter(f"{name} must be a {cls.__name__}, not {type(value).__name__}.", name)
    return value.checked()
