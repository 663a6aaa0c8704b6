"""Typed access to a checkpoint's quantization settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short

__all__ = ["Header", "QuantSettings"]

_KEYS = ("quantization_config", "compression_config")
_NESTED = ("text_config", "llm_config", "language_config")
_FILES = ("quant_config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json")
"""Names of settings files beside config.json, which AutoAWQ, AutoGPTQ, AutoRound and ModelOpt write or wrote."""


class Header(NamedTuple):
    """The header of a tensor."""

    dtype: str
    """Name of the dtype in the safetensors format."""
    shape: tuple[int, ...]


class QuantSettings:
    """The entries of one object; `null` counts as absent. `source`: its location, for error messages."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self.fields = fields
        self.source = source

    @classmethod
    def find(cls, config: Mapping[str, Any], folder: Path) -> QuantSettings | None:
        """Return the settings in config.json or in a file beside it, or None if there are none.

        Raises InvalidCheckpoint for settings that are not an object, and for two that differ.
        """
        inner = [config, *(each for key in _NESTED if isinstance(each := config.get(key), dict))]
        found = [
            cls(_object(fields[key], f"{folder / 'config.json'}: {key}"), f"{folder / 'config.json'}: {key}")
            for fields in inner
            for key in _KEYS
            if fields.get(key) is not None
        ]
        if not found:
            found = [cls(_read(folder / name), str(folder / name)) for name in _FILES if (folder / name).is_file()][:1]
        for other in found[1:]:
            if other.fields != found[0].fields:
                raise InvalidCheckpoint(f"{found[0].source} and {other.source} differ. Remove the wrong one.")
        return found[0] if found else None

    def get(self, *names: str) -> Any:
        """Return the value of the first of these keys that is set, or None."""
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)

    def invalid(self, name: str, what: str) -> NoReturn:
        raise InvalidCheckpoint(f"{self.source}: {name} = {short(self.fields.get(name))}, {what}. Correct the file.")

    def unsupported(self, name: str, what: str) -> NoReturn:
        raise UnsupportedModel(f"{self.source}: {name} = {short(self.fields.get(name))} is not implemented. {what}")

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names)
        if value is None and default is not None:
            return default
        name = next((each for each in names if self.fields.get(each) is not None), names[0])
        if isinstance(value, bool) or not isinstance(value, int):
            self.invalid(name, "where an integer belongs")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.invalid(name, "where true or false belongs")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Raise UnsupportedModel unless `name` is absent or has one of these values."""
        value = self.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            self.unsupported(name, f"Supported: {', '.join(map(repr, allowed))}.")

    def object(self, name: str) -> QuantSettings:
        """Return the object `name`; empty if there is none."""
        source = f"{self.source}.{name}"
        value = self.get(name)
        return QuantSettings({} if value is None else _object(value, source), source)

    def group_size(self, *names: str) -> int:
        """Return the number of input features with one scale: a multiple of 32, or -1 for all of them. Raises
        UnsupportedModel."""
        size = self.integer(*names)
        if size != -1 and (size <= 0 or size % 32):
            name = next(each for each in names if self.fields.get(each) is not None)
            self.unsupported(name, "Supported: multiples of 32, and -1 for one group of all input features.")
        return size


def _object(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{source} is {short(value)}, where an object belongs. Correct the file.")
    return value


def _read(file: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{file} cannot be read as JSON ({error}). Download the file again.") from None
