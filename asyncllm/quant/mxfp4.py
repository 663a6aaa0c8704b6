"""MXFP4, as in gpt-oss (`quant_method` "mxfp4"): experts in e2m1, with an exponent for each group, kept in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.kernels.e2m1 import CHUNK, E2M1, E8M0_BIAS, GROUP, MAX_E8M0, E2M1Weight, e2m1_experts, pack_e2m1
from asyncllm.layers.layer import PartKey
from asyncllm.layers.linear_method import FLOATS, LinearMethod, Stored, Weighted, frozen_parameter
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["MXFP4", "PackedMXFP4"]

_NAN = 255

_BYTES = Stored(frozenset({"U8"}))


@register("mxfp4")
class MXFP4(Scheme):
    """Experts that have `blocks` and `scales` in place of a weight."""

    @classmethod
    def read(cls, settings: QuantSettings) -> MXFP4:
        return cls()

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        return PackedMXFP4() if {"blocks", "scales"} & tensors.keys() else None


class _State(Protocol):
    """The method's state in a layer."""

    words: Tensor | None
    exponents: Tensor | None
    whole: Tensor | None
    """The weights in the model's dtype, for a rank whose input features do not begin and end at a group."""
    offset: Tensor | None
    pending: dict[tuple[str | None, int | None], dict[str, Tensor]]
    """The tensors of parts whose second tensor is not read yet."""


def _state(layer: Weighted) -> _State:
    return cast(_State, layer)


@dataclass(frozen=True)
class PackedMXFP4(LinearMethod):
    """For each expert: blocks uint8 [N, K / 32, 16], with even features in the low four bits, and scales uint8
    [N, K / 32]."""

    name: ClassVar[str] = "mxfp4"
    by_row = True
    invariant: bool = False

    @property
    def replaceable(self) -> bool:
        return False

    def stored(self, suffix: str) -> Stored:
        return FLOATS if suffix == "bias" else _BYTES

    def create(self, layer: Weighted) -> None:
        if layer.num_experts is None:
            raise UnsupportedModel("MXFP4 weights that are not experts are not implemented.")
        own, stack = _state(layer), (layer.num_experts, layer.out_features)
        n, k = layer.out_features, layer.in_features
        columns = layer.own_columns()
        own.words = own.exponents = own.whole = None
        if columns.start % GROUP or k % GROUP:
            own.whole = frozen_parameter(*stack, k)
        else:
            chunks = -(-k // CHUNK)
            own.words = frozen_parameter(layer.num_experts, chunks, n, GROUP, dtype=torch.int16)
            own.exponents = frozen_parameter(layer.num_experts, chunks, n, dtype=torch.int32)
        own.offset = frozen_parameter(*stack) if layer.has_bias else None
        own.pending = {}

    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        groups, rest = divmod(layer.in_features, GROUP)
        if rest:
            raise InvalidCheckpoint(f"{layer.in_features} input features are not divided into groups of {GROUP}")
        parts: dict[PartKey, tuple[int, ...]] = {}
        for index in range(layer.num_experts or 0):
            for part, rows in layer.rows.items():
                size = rows.stop - rows.start
                parts["blocks", part, index] = (size, groups, GROUP // 2)
                parts["scales", part, index] = (size, groups)
                if layer.has_bias:
                    parts["bias", part, index] = (size,)
        return parts

    def share(self, layer: Weighted, suffix: str, tensor: Tensor, taken: slice, *, first: bool) -> Tensor:
        if layer.shard == "column":
            return tensor[taken]
        if suffix == "bias":
            return tensor if first else torch.zeros_like(tensor)
        # A rank's input features need not begin or end at a group.
        return _by_feature(tensor)[:, taken]

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        own, rows = _state(layer), layer.rows[part]
        if suffix == "bias":
            assert own.offset is not None
            own.offset[index, rows].copy_(tensor)
            return
        device = next(each.device for each in (own.words, own.whole) if each is not None)
        waiting = own.pending.setdefault((part, index), {})
        waiting[suffix] = tensor.to(device, copy=True)
        if len(waiting) < 2:
            return
        del own.pending[part, index]
        codes, scales = (
            each if each.shape[1:] == (layer.in_features,) else _by_feature(each)
            for each in (waiting["blocks"], waiting["scales"])
        )
        if (scales == _NAN).any():
            raise InvalidCheckpoint("the scales of this weight are not all numbers; download it again")
        if (scales > MAX_E8M0).any():
            raise UnsupportedModel(f"MXFP4 scales above {2.0 ** (MAX_E8M0 - E8M0_BIAS):g} are not implemented.")
        if own.whole is not None:
            values = torch.tensor(E2M1, device=codes.device)
            own.whole[index, rows].copy_(torch.ldexp(values[codes.int()], scales.int() - E8M0_BIAS))
        elif own.words is not None and own.exponents is not None:
            own.words[index][:, rows], own.exponents[index][:, rows] = pack_e2m1(codes, scales[:, ::GROUP])

    def batch_invariant(self) -> LinearMethod:
        return replace(self, invariant=True)

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        raise TypeError("the weight is one of experts")

    def embed(self, layer: Weighted, ids: Tensor, scale: float | None) -> Tensor:
        raise TypeError("the weight is one of experts")

    def experts(
        self,
        gate_up: Weighted,
        down: Weighted,
        x: Tensor,
        weights: Tensor,
        expert_ids: Tensor,
        *,
        limit: float | None = None,
    ) -> Tensor:
        first, second = self.weight(gate_up), self.weight(down)
        biases = [_state(each).offset for each in (gate_up, down)]
        if not self.invariant and isinstance(first, E2M1Weight) and isinstance(second, E2M1Weight):
            return e2m1_experts(
                x, first, second, weights, expert_ids, gate_up_bias=biases[0], down_bias=biases[1], limit=limit
            )
        product = kernels.fused_experts_invariant if self.invariant else kernels.fused_experts
        dense = [each.expanded(x.dtype) if isinstance(each, E2M1Weight) else each for each in (first, second)]
        return product(
            x, dense[0], dense[1], weights, expert_ids, gate_up_bias=biases[0], down_bias=biases[1], limit=limit
        )

    def weight(self, layer: Weighted) -> E2M1Weight | Tensor:
        """Return the layer's weight: packed, or [E, N, K] in the model's dtype."""
        own = _state(layer)
        if own.words is None or own.exponents is None:
            assert own.whole is not None
            return own.whole
        return E2M1Weight(own.words, own.exponents, layer.in_features)


def _by_feature(tensor: Tensor) -> Tensor:
    """Expand blocks or scales of N output features to the code or scale of each input feature, uint8 [N, K]."""
    if tensor.ndim == 2:
        return tensor.repeat_interleave(GROUP, 1)
    return torch.stack((tensor & 15, tensor >> 4), -1).flatten(1)
