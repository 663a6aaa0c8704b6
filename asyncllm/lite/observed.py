"""Statistics of the inputs of projections, collected while an unquantized layer runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.moe import gate_of_experts
from asyncllm.layers.linear_method import LinearMethod, Unquantized, Weighted

__all__ = ["InputStatistics", "Observed"]

MAX_ROWS = 1024
"""Maximum number of activation rows kept."""


@dataclass(slots=True)
class InputStatistics:
    """Statistics of the K input features of a projection or of one expert. Written by `add` and `divide`."""

    count: int
    """Number of rows seen."""
    largest: Tensor
    """float32 [K]: largest magnitude."""
    total: Tensor
    """float32 [K]: sum of magnitudes."""
    moments: Tensor
    """float32 [K, K]: sum of the products of each two features."""
    rows: Tensor
    """float32 [R, K]: a sample of the rows."""

    @classmethod
    def empty(cls, size: int, device: torch.device) -> InputStatistics:
        return cls(
            0,
            torch.zeros(size, device=device),
            torch.zeros(size, device=device),
            torch.zeros(size, size, device=device),
            torch.zeros(0, size, device=device),
        )

    @property
    def mean(self) -> Tensor:
        """The mean magnitude of each feature [K]."""
        return self.total / max(1, self.count)

    def add(self, x: Tensor) -> None:
        """Add rows [T, K]."""
        if not len(x):
            return
        x = x.float()
        magnitudes = x.abs()
        self.count += len(x)
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        self.total += magnitudes.sum(0)
        self.moments.addmm_(x.t(), x)
        # Every batch gets an equal share of the sample.
        kept = torch.cat([self.rows, x[:: max(1, len(x) // (MAX_ROWS // 4))]])
        self.rows = kept[torch.linspace(0, len(kept) - 1, min(len(kept), MAX_ROWS), device=x.device).long()]

    def divide(self, scales: Tensor) -> None:
        """Update the statistics as if every row had been divided by scales [K]."""
        self.largest = self.largest / scales
        self.total = self.total / scales
        self.moments = self.moments / scales / scales[:, None]
        self.rows = self.rows / scales


class Observed(Unquantized):
    """The unquantized product, which passes its input to `observe`: the layer, the expert if there are several, the
    rows."""

    # Ops fused with the product would hide its input.
    product_exact = LinearMethod.product_exact
    product_gated = LinearMethod.product_gated
    product_rope_fill_kv = LinearMethod.product_rope_fill_kv

    def __init__(self, observe: Callable[[Weighted, int | None, Tensor], None]) -> None:
        self._observe = observe

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        self._observe(layer, None, x.reshape(-1, x.shape[-1]))
        return super().product(layer, x, out=out)

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
        for expert in torch.unique(expert_ids[expert_ids >= 0]).tolist():
            rows = x[(expert_ids == expert).any(-1)]
            self._observe(gate_up, expert, rows)
            product = F.linear(rows, gate_up.weight[expert], None if gate_up.bias is None else gate_up.bias[expert])
            hidden = gate_of_experts(product, down.in_features, limit=limit, gelu=gate_up.gelu)
            self._observe(down, expert, hidden)
        return super().experts(gate_up, down, x, weights, expert_ids, limit=limit)
