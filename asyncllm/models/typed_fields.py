"""TypedFields: typed reads of a JSON object of a checkpoint, refusing values that are impossible or not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel

__all__ = ["MAX_NUMBER", "MAX_POSITION", "MAX_SIZE", "MISSING", "TypedFields"]

MAX_SIZE = 2**24
"""Above any width, vocabulary or context in use; products of a few such sizes still fit in 64 bits."""
MAX_POSITION = 2**31 - 1
MAX_NUMBER = 1e30
"""Above any real number in use; integers beyond 1e308 would not even convert."""

MISSING: Any = object()
"""The default of an entry that must not be absent."""


class TypedFields:
    """The entries of an object. `null` counts as absent.

    Reads raise InvalidCheckpoint for an entry that is missing without a default, of another type, or out of bounds.
    """

    def __init__(self, fields: Mapping[str, Any], *, source: str) -> None:
        """`source`: where the object is, for errors."""
        self.fields = fields
        self.source = source

    def invalid(self, key: str, what: str) -> NoReturn:
        """Raise InvalidCheckpoint for an impossible value."""
        raise InvalidCheckpoint(f"{self.source}: {key} = {_shown(self.fields.get(key))}, {what}. Correct the file.")

    def unsupported(self, key: str, what: str) -> NoReturn:
        """Raise UnsupportedModel for a value that is not implemented."""
        raise UnsupportedModel(f"{self.source}: {key} = {_shown(self.fields.get(key))} is not implemented. {what}")

    def integer(self, key: str, default: Any = MISSING, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        value = self.read(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.invalid(key, "where an integer belongs")
        if not minimum <= value <= maximum:
            self.invalid(key, f"outside [{minimum}, {maximum}]")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Return a positive integer, or None if the file says null. `default` replaces an absent key."""
        if key in self.fields and self.fields[key] is None:
            return None
        return default if key not in self.fields else self.integer(key)

    def number(self, key: str, default: Any = MISSING, *, positive: bool = True) -> float:
        value = self.read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            self.invalid(key, "where a finite number belongs")
        if value < 0 or (positive and value == 0):
            self.invalid(key, f"which must be {'above' if positive else 'at least'} 0")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Return a positive number, or None if the file says null. `default` replaces an absent key."""
        if key in self.fields and self.fields[key] is None:
            return None
        return default if key not in self.fields else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return `count` real numbers; ones if the key is absent."""
        values = self.fields.get(key)
        if values is None:
            return (1.0,) * count
        if not isinstance(values, list) or len(values) != count:
            self.invalid(key, f"where a list of {count} numbers belongs")
        each = {str(index): value for index, value in enumerate(values)}
        part = TypedFields(each, source=f"{self.source}: {key}")
        return tuple(part.number(name, positive=False) for name in each)

    def flag(self, key: str, default: Any = MISSING) -> bool:
        value = self.read(key, default)
        if not isinstance(value, bool):
            self.invalid(key, "where true or false belongs")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse any value of `key` except these; an absent key passes. Raises UnsupportedModel."""
        value = self.fields.get(key)
        if value == "swish":
            value = "silu"
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            self.unsupported(key, f"Supported: {', '.join(_shown(each) for each in allowed) or 'none'}.")

    def read(self, key: str, default: Any) -> Any:
        """Return an entry of any type."""
        value = self.fields.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise InvalidCheckpoint(f"{self.source}: {key} is missing. Complete the file.")
        return default


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
