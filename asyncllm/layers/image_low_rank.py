"""Additional low-rank products for image tokens: the partial LoRA of InternLM-XComposer2 (Dong et al., 2024)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncllm.layers.image_rows import ImageRowsConfig
from asyncllm.layers.images import IMAGE_ROWS, ImageRows, image_tokens
from asyncllm.layers.linear import Linear, MergedLinear
from asyncllm.layers.linear_method import UNQUANTIZED
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["LowRankProducts", "LowRankRows"]


class LowRankRows(ImageRows):
    """Image tokens get an additional B A x `scale`. Gates and ups have an A each, stored one after the other."""

    columns = (IMAGE_ROWS,)

    def __init__(self, linear: Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self._scale, divided = scale, linear.shard == "row"
        gated = "gate" in linear.rows
        self._num_inputs = len(linear.rows) if gated else 1
        self.a = (
            MergedLinear(linear.in_features, dict.fromkeys(("gate", "up"), rank))
            if gated
            else Linear(linear.in_features, rank, shard="row")
        )
        self.a.shard = "row" if divided else "replicated"
        self.b = copy.deepcopy(linear)
        self.b.in_features, self.b.has_bias = rank, False
        self.b.whole_shapes = {name: (shape[0], rank) for name, shape in linear.whole_shapes.items()}
        self.b.shard = "replicated" if divided else linear.shard
        self.b.attach(UNQUANTIZED)

    def apply_to(self, y: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        tokens = image_tokens(step)
        if tokens is None:
            return torch.where(step[IMAGE_ROWS][:, None] >= 0, y + self._added(x), y)
        y[tokens] += self._added(x[tokens])
        return y

    def _added(self, x: Tensor) -> Tensor:
        """x [T, in] -> the addition to the layer's product [T, out]."""
        inner = self.a.method.product(self.a, x).chunk(self._num_inputs, -1)
        method, rows = self.b.method, self.b.rows
        if self._num_inputs == 1:
            return method.product(self.b, inner[0]) * self._scale
        # Each part uses its own rows of the product with its own A.
        added = [method.product(self.b, part)[..., rows[name]] for part, name in zip(inner, rows, strict=True)]
        return torch.cat(added, -1) * self._scale


class LowRankProducts(ImageRowsConfig, frozen=True, kw_only=True):
    """Each linear layer has additional low-rank products."""

    rank: int
    ranks: Mapping[str, tuple[int, float]]
    """Rank and scale of the layers that differ from the default rank and scale 1, by name."""

    def of_layer(self, name: str, linear: Linear) -> ImageRows | None:
        rank, scale = self.ranks.get(name, (self.rank, 1.0))
        return LowRankRows(linear, rank=rank, scale=scale)
