"""MXFP4 as gpt-oss has it (`quant_method` "mxfp4"): experts of 4 bits, which become plain weights as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.layers.linear_method import (
    FLOATS,
    BatchInvariant,
    LinearMethod,
    PartKey,
    Stored,
    Unquantized,
    Weighted,
)
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["MXFP4", "ExpandedMXFP4"]

GROUP = 32
"""Neighbouring input features with one scale, two in a byte."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7 of e2m1; those of 8 to 15 are negative."""

_BIAS = 127
"""Of the scales, which are exponents of 2 (e8m0)."""

_NAN = 255

_BYTES = Stored(frozenset({"U8"}))


@register("mxfp4")
class MXFP4(Scheme):
    """`blocks` and `scales` in the place of a weight, of modules that have them."""

    @classmethod
    def read(cls, settings: QuantSettings) -> MXFP4:
        return cls()

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        return EXPANDED if {"blocks", "scales"} & tensors.keys() else None


class _Layer(Protocol):
    """What a layer of this method has beside its own."""

    pending: dict[tuple[str | None, int | None], dict[str, Tensor]]
    """One tensor of parts whose other has not come yet."""


class ExpandedMXFP4(Unquantized):
    """blocks uint8 [N, K / 32, 16], the feature of the even number in the low four bits, and scales uint8 [N, K / 32]
    fill the parameter `weight` of the model's type. In bfloat16 and float32 nothing is lost."""

    name: ClassVar[str] = "mxfp4"

    @property
    def replaceable(self) -> bool:
        return False

    def stored(self, suffix: str) -> Stored:
        return FLOATS if suffix == "bias" else _BYTES

    def create(self, layer: Weighted) -> None:
        super().create(layer)
        cast(_Layer, layer).pending = {}

    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        groups, rest = divmod(layer.in_features, GROUP)
        if rest:
            raise InvalidCheckpoint(f"{layer.in_features} input features are not divided into groups of {GROUP}")
        parts: dict[PartKey, tuple[int, ...]] = {}
        for (suffix, part, index), shape in super().expected_parts(layer).items():
            if suffix == "weight":
                parts["blocks", part, index] = (shape[0], groups, GROUP // 2)
                parts["scales", part, index] = (shape[0], groups)
            else:
                parts[suffix, part, index] = shape
        return parts

    def share(self, layer: Weighted, suffix: str, tensor: Tensor, taken: slice, *, first: bool) -> Tensor:
        if layer.shard == "column" or suffix == "bias":
            return super().share(layer, suffix, tensor, taken, first=first)
        # A rank's input features need not begin or end with a group.
        return _by_feature(tensor)[:, taken]

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if suffix == "bias":
            super().load_part(layer, suffix, part, index, tensor)
            return
        pending = cast(_Layer, layer).pending
        waiting = pending.setdefault((part, index), {})
        waiting[suffix] = tensor.to(layer.weight.device, copy=True)
        if len(waiting) < 2:
            return
        del pending[part, index]
        codes, scales = (
            each if each.shape[1:] == (layer.in_features,) else _by_feature(each)
            for each in (waiting["blocks"], waiting["scales"])
        )
        if (scales == _NAN).any():
            raise InvalidCheckpoint("the scales of this weight are not all numbers; download it again")
        values = torch.tensor([*_VALUES, *(-each for each in _VALUES)], device=codes.device)
        weight = torch.ldexp(values[codes.int()], scales.int() - _BIAS)
        super().load_part(layer, "weight", part, index, weight)

    def batch_invariant(self) -> LinearMethod:
        return BATCH_INVARIANT_EXPANDED


class _BatchInvariantMXFP4(ExpandedMXFP4, BatchInvariant):
    """The same parameters and products that round every row alike."""


EXPANDED, BATCH_INVARIANT_EXPANDED = ExpandedMXFP4(), _BatchInvariantMXFP4()


def _by_feature(tensor: Tensor) -> Tensor:
    """blocks or scales of N output features -> the code or the scale of each input feature, uint8 [N, K]."""
    if tensor.ndim == 2:
        return tensor.repeat_interleave(GROUP, 1)
    return torch.stack((tensor & 15, tensor >> 4), -1).flatten(1)
