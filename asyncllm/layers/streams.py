"""The beginning and the end of AltUp's residual streams (`alternating_updates`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import Norm
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["MergingNorm", "Spread"]

_LEAST = 1e-5
"""Lower bound of a mean square under a root in a denominator."""


class Spread(Layer):
    """x [T, hidden] -> [T, S * hidden]: x, and products of x scaled to its magnitude."""

    def __init__(self, hidden_size: int, streams: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(
            Linear(hidden_size, hidden_size, shard="replicated") for _ in range(streams - 1)
        )

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        return torch.cat([x, *(_as_large(each(x, step), x) for each in self.projections)], 1)


class MergingNorm(Norm):
    """The norm of the streams' mean, where each stream but the first is a product scaled to the first's magnitude."""

    def __init__(self, hidden_size: int, streams: int, *, norm: Norm) -> None:
        Layer.__init__(self)
        self.projections = nn.ModuleList(
            Linear(hidden_size, hidden_size, shard="replicated") for _ in range(streams - 1)
        )
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """x [T, S * hidden] -> [T, hidden]."""
        first, *others = x.chunk(1 + len(self.projections), 1)
        products = (
            each.method.product(each, other.contiguous())  # type: ignore[operator, union-attr]
            for each, other in zip(self.projections, others, strict=True)
        )
        mean = torch.stack([first, *(_as_large(each, first) for each in products)]).mean(0)
        normed: Tensor = self.norm(mean)
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.forward(total), total


def _as_large(x: Tensor, model: Tensor) -> Tensor:
    """Return x [T, hidden] with the root mean square of `model`."""
    wanted = model.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
