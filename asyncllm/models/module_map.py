"""The module map: user classes that replace a family's layers and keep their weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from asyncllm.errors import ModelError
from asyncllm.models.decoder import DecoderLM

__all__ = ["MODULE_MAP", "replace_layers", "replaces"]

Layer = TypeVar("Layer", bound=type[nn.Module])

MODULE_MAP: dict[tuple[str, str], type[nn.Module]] = {}
"""(architecture, name of layers) -> their class. Written by `replaces`, and restored if a plugin fails."""


def replaces(layers: str, *architectures: str) -> Callable[[Layer], Layer]:
    """Decorate a class that replaces the layers of this name in models of these architectures.

    `layers` is a name as in weight tables, such as "layers.{i}.mlp" or "layers.0.attn". The class derives from the
    layers' own class, and takes over their parameters and settings: its `__init__` is not called.
    """

    def enter(replacement: Layer) -> Layer:
        MODULE_MAP.update({(architecture, layers): replacement for architecture in architectures})
        return replacement

    return enter


def replace_layers(model: DecoderLM) -> None:
    """Give a new model's layers their classes from the module map. Raises ModelError for a name that no layer has, and
    for a class that does not derive from the layer's."""
    for (architecture, layers), replacement in MODULE_MAP.items():
        if architecture != model.config.architecture:
            continue
        pattern = re.compile(re.escape(layers).replace(r"\{i\}", r"\d+"))
        found = [(name, module) for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not found:
            raise ModelError(
                f"{replacement.__qualname__} replaces {layers!r} of {architecture}, which has no such layers. Name "
                f"some that print(model) shows, with {{i}} for any number."
            )
        for name, module in found:
            if not issubclass(replacement, type(module)):
                raise ModelError(
                    f"{replacement.__qualname__} replaces {name} of {architecture}, but derives not from its class, "
                    f"{type(module).__name__}. Derive it from that."
                )
            module.__class__ = replacement
