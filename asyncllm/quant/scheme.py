"""Scheme, the base class of quantization formats, and the selection of a checkpoint's scheme."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

import asyncllm.quant
from asyncllm.errors import InvalidParameter, UnsupportedModel, short
from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.expansion import Expansion
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["Scheme", "refuse_mlx", "register", "scheme_of"]

_Class = TypeVar("_Class", bound="type[Scheme]")

_SCHEMES: dict[str, type[Scheme]] = {}

_BY_KEY: Mapping[str, str] = {
    "quant_algo": "modelopt",
    "config_groups": "compressed-tensors",
    "quantization": "modelopt",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
}
"""Key in settings without a `quant_method` -> the method."""

_INSTEAD = "Use the model's own checkpoint in bfloat16, which asyncllm lite quantizes."


class Scheme(ABC):
    """How the weights of one checkpoint are quantized."""

    at_load: ClassVar[bool] = False
    """Whether the scheme is for unquantized checkpoints, whose projections are rounded while they are read."""

    @classmethod
    @abstractmethod
    def read(cls, settings: QuantSettings) -> Scheme:
        """Return the scheme with these settings. Raises InvalidCheckpoint for impossible settings, UnsupportedModel for
        unsupported ones."""

    @abstractmethod
    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        """Return the method of the checkpoint's module `module`, given its tensors (suffix -> header), or None if it is
        unquantized. Modules with the same method get equal ones.

        Raises InvalidCheckpoint and UnsupportedModel.
        """

    def expansions(
        self, headers: Mapping[str, Header], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> Iterable[Expansion]:
        """Yield the weights that are expanded while they are read. They are unquantized to `method` and all other code.

        `headers`: those of all tensors. `read` returns some small tensors. Raises as `method` does.
        """
        return ()


def register(*names: str) -> Callable[[_Class], _Class]:
    """Register a scheme for checkpoints whose `quant_method` is one of `names`."""

    def enter(scheme: _Class) -> _Class:
        for name in names:
            _SCHEMES[name] = scheme
        return scheme

    return enter


@cache
def schemes() -> Mapping[str, type[Scheme]]:
    """Return `quant_method` -> scheme, from every module in `asyncllm.quant`."""
    for module in pkgutil.iter_modules(asyncllm.quant.__path__):
        importlib.import_module(f"asyncllm.quant.{module.name}")
    return dict(sorted(_SCHEMES.items()))


def refuse_mlx(config: Mapping[str, Any], folder: Path) -> None:
    """Raise UnsupportedModel for the config.json of an MLX checkpoint, whose tensors have other shapes and, in some
    models, other names."""
    for key, mark in (("quantization", "bits"), ("quantization_config", "mode")):
        settings = config.get(key)
        if isinstance(settings, Mapping) and mark in settings and "quant_method" not in settings:
            raise UnsupportedModel(
                f"{folder / 'config.json'}: {key} = {short(settings)} is MLX's, which is not implemented. {_INSTEAD}"
            )


def scheme_of(config: Mapping[str, Any], folder: Path, model_format: str | None) -> Scheme | None:
    """Return the scheme of the checkpoint in `folder` with this `config` (config.json), or None for unquantized
    weights.

    `model_format` is the engine's setting: None to follow the checkpoint, "hf" for unquantized weights, or the name of
    the scheme. Raises InvalidCheckpoint, UnsupportedModel, and InvalidParameter if it contradicts the checkpoint.
    """
    settings = QuantSettings.find(config, folder)
    if settings is None:
        at_load = schemes().get(f"{model_format} at load")
        if at_load is not None:
            return at_load.read(QuantSettings({}, str(folder)))
        if model_format not in (None, "hf"):
            raise InvalidParameter(
                f"model_format is {model_format!r}, and {folder} says nothing of a quantization: neither config.json "
                f"(quantization_config) nor a quant_config.json beside it. Leave model_format at None.",
                "model_format",
            )
        return None
    name = settings.get("quant_method")
    if name is None:
        # Files from before the key existed; AutoAWQ's have a version.
        name = next((each for key, each in _BY_KEY.items() if key in settings.fields), model_format)
        name = name or ("awq" if settings.get("version") is not None else "gptq")
    scheme = schemes().get(name) if isinstance(name, str) else None
    meant = name if model_format is None else model_format
    if meant != name and (scheme is None or schemes().get(meant) is not scheme):
        raise InvalidParameter(
            f"model_format is {model_format!r}, and {settings.source} says {short(name)}. Leave model_format at None.",
            "model_format",
        )
    if scheme is None:
        known = [each for each in schemes() if " " not in each]
        raise UnsupportedModel(
            f"{settings.source}: quant_method = {short(name)} is not implemented. {_INSTEAD} Those in "
            f"{', '.join(known)} are read too."
        )
    return scheme.read(settings)
