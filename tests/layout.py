"""How a checkpoint is written that a native model of transformers computes alike, and ways of renaming tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Fields", "Layout", "Tensors", "fused", "renamed", "under_language_model", "unfused_experts"]

Fields = dict[str, Any]
Tensors = dict[str, Tensor]


def unchanged(tensors: Tensors, fields: Fields) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written, beside the native model that computes the same."""

    family: str
    """The module of asyncllm.models that reads it."""
    model_type: str
    native_type: str
    architecture: str
    extra: Fields = field(default_factory=dict)
    """Entries that join the family's tiny ones."""
    dropped: tuple[str, ...] = ()
    """Entries of `tiny` that a file of this kind does not have."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Entries of its config.json -> the native model's for the same."""
    native: Fields = field(default_factory=dict)
    """Entries that only the native model needs."""
    rope: Callable[[Fields], Fields] | None = None
    """The native model's rope_parameters, of a layout that has entries of its own for them."""
    rename: Callable[[Tensors, Fields], Tensors] = unchanged
    """The native model's tensors under this layout's names, given config.json's entries."""
    nested: str = ""
    """The entry of config.json that holds those of the language model."""
    patch: Callable[[nn.Module], None] | None = None
    """What makes the native model's computation this layout's, before its weights are there."""
    oracle: Callable[[Tensors], Tensors] = lambda tensors: tensors
    """The native model's tensors, from the native ones that are stored."""

    call: Callable[[list[int]], Fields] = lambda tokens: {}
    """What the oracle's forward takes besides the tokens."""

    def native_fields(self, fields: Fields) -> Fields:
        """config.json of the native model, from the entries of this layout's."""
        named = {self.words.get(key, key): value for key, value in fields.items()}
        if self.family == "qwen":
            named |= {"intermediate_size": fields["intermediate_size"] // 2, "num_key_value_heads": 4}
        if self.rope is not None:
            named |= {"rope_parameters": {"rope_type": "default", **self.rope(fields)}}
        return {**named, **self.native, "model_type": self.native_type}


def renamed(names: Mapping[str, str]) -> Callable[[Tensors, Fields], Tensors]:
    def rename(tensors: Tensors, fields: Fields) -> Tensors:
        def new(name: str) -> str:
            for old, other in names.items():
                name = name.replace(old, other)
            return name

        return {new(name): tensor for name, tensor in tensors.items()}

    return rename


def fused(tensors: Tensors, into: str) -> Tensors:
    """q, k and v one after the other in one tensor, of weights and biases."""
    joined = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
            joined[name.replace("self_attn.q_proj", into)] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            joined[name] = tensor
    return joined


def unfused_experts(tensors: Tensors, fields: Fields) -> Tensors:
    unfused = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    unfused[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                unfused[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            unfused[name] = tensor
    return unfused


def under_language_model(tensors: Tensors, towers: Tensors) -> Tensors:
    """A text model's tensors among those of its towers, as files of several modalities have them."""
    return {**{name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}, **towers}
