"""MLPs: gated, down(act(gate(x)) * up(x)), and plain, down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import RoundedRows, Rounding
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear, MergedLinear
from asyncllm.layers.linear_method import Activation
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["GatedMLP", "PlainMLP", "ScaledMLP", "SparseMLP"]

_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}


class GatedMLP(Layer):
    """x [T, hidden] -> [T, hidden]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: Activation = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate": intermediate_size, "up": intermediate_size}, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, shard="row", bias=bias)
        self.activation: Activation = activation

    def rounding(self, step: StepInputs) -> Rounding | None:
        return self.gate_up.rounding(step) if self.gate_up.method.rounds else None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        gated: Tensor | RoundedRows | None = self.gate_up.gated(x, self.activation, step)
        if gated is None:
            product, rounding = self.gate_up(x, step), self.down.rounding(step)
            if rounding is None:
                gated = _GATES[self.activation](product)
            else:
                gated = kernels.gate_rounded(product, rounding, gelu=self.activation == "gelu_tanh")
        out: Tensor = self.down(gated, step)
        return out


class ScaledMLP(GatedMLP):
    """Like `GatedMLP`, with one factor on the gate before its activation and one on the result (Falcon-H1)."""

    def __init__(self, *sizes: int, gate_scale: float, scale: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.gate_scale, self.scale = gate_scale, scale

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        product = self.gate_up(x, step)
        product[:, : product.shape[1] // 2] *= self.gate_scale
        out: Tensor = self.down(_GATES[self.activation](product), step)
        return out.mul_(self.scale)


class SparseMLP(GatedMLP):
    """Like `GatedMLP`, but of the gate it keeps only the excess over the mean plus some standard deviations of the
    token's features (Gemma 3n)."""

    def __init__(self, *sizes: int, deviations: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.deviations = deviations
        self.ranks: RankGroup | None = None
        """The ranks with the other features."""

    def divide(self, group: RankGroup) -> None:
        self.ranks = group

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        product = self.gate_up(x, step)
        gate = product[:, : product.shape[1] // 2]
        wide = gate.float()
        if self.ranks is None:
            deviation, mean = torch.std_mean(wide, -1, correction=0, keepdim=True)
        else:
            # Ranks have equal numbers of features, so the mean over all features is the mean of the ranks' means.
            mean = self.ranks.all_reduce(wide.mean(-1, keepdim=True)) / self.ranks.size
            variance = self.ranks.all_reduce((wide - mean).square().mean(-1, keepdim=True)) / self.ranks.size
            deviation = variance.sqrt()
        gate.copy_((wide - mean - self.deviations * deviation).relu_())
        out: Tensor = self.down(_GATES[self.activation](product), step)
        return out


class PlainMLP(Layer):
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.up = Linear(hidden_size, intermediate_size, shard="column", bias=bias)
        self.down = Linear(intermediate_size, hidden_size, shard="row", bias=bias)
        self.activation: Activation = activation

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        out: Tensor = self.down(kernels.activate(self.up(x, step), self.activation), step)
        return out
