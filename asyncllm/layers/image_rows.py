"""What images' tokens have of their own in a decoder's linear layers: weights (CogVLM's visual experts: Wang et al.,
2023), or products of low rank besides (InternLM-XComposer2's partial LoRA: Dong et al., 2024).

Steps without images do not see any of it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncllm.layers.images import IMAGE_ROWS, ImageRows, image_parts, image_tokens
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_method import UNQUANTIZED
from asyncllm.layers.step_inputs import Column, StepInputs
from asyncllm.protocol import Batch

__all__ = ["ExpertRows", "ImageExperts", "ImageRowsConfig", "LowRankRows"]


def _inner(batch: Batch, positions: NDArray[Any]) -> NDArray[Any]:
    inner = np.zeros(len(positions), np.int64)
    start = len(batch.decode)
    for row in batch.prefill:
        for part in image_parts(row):
            place = start + part.position - row.position
            inner[place : place + part.last - part.first] = 1
            if part.last == part.image.num_features:
                inner[place + part.last - part.first - 1] = 0
        start += len(row.tokens)
    return inner


INNER_ROWS = Column(name="inner_image_rows", dtype=torch.int64, per="token", padding=0, of_step=_inner)
"""1: a token of an image, but not its last one, which is computed as text."""


class ExpertRows(ImageRows):
    """Tokens of images, each one's last apart, have another weight."""

    columns = (INNER_ROWS, IMAGE_ROWS)

    def __init__(self, linear: Linear, *, bias: bool) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear)
        self.linear.has_bias = bias
        self.linear.attach(UNQUANTIZED)

    def apply_to(self, y: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        method, own = self.linear.method, step[INNER_ROWS][:, None] > 0
        tokens = image_tokens(step)
        if tokens is None:
            return torch.where(own, method.product(self.linear, x), y)
        y[tokens] = torch.where(own[tokens], method.product(self.linear, x[tokens]), y[tokens])
        return y


class LowRankRows(ImageRows):
    """Tokens of images have B A x `scale` besides. Gates and ups have an A each, which follow one another."""

    columns = (IMAGE_ROWS,)

    def __init__(self, linear: Linear, *, rank: int, scale: float) -> None:
        super().__init__()
        self._scale, divided = scale, linear.shard == "row"
        gated = "gate" in linear.rows
        self._groups = [[name] for name in linear.rows] if gated else [list(linear.rows)]
        self.a = Linear(linear.in_features, rank * len(self._groups), shard="row" if divided else "replicated")
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
        """x [T, in] -> what is added to the layer's product [T, out]."""
        inner = self.a.method.product(self.a, x).chunk(len(self._groups), -1)
        weight, rows = self.b.weight, self.b.rows
        added = [
            torch.nn.functional.linear(part, torch.cat([weight[rows[name]] for name in names]))
            for part, names in zip(inner, self._groups, strict=True)
        ]
        return torch.cat(added, -1) * self._scale


class ImageRowsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder's layers have for images' tokens."""

    @abstractmethod
    def of_layer(self, name: str, linear: Linear) -> ImageRows | None:
        """Return what the linear layer `name` of a block has; None: nothing."""

    def attach(self, layers: nn.ModuleList) -> None:
        """Give it to the linear layers of a decoder's blocks."""
        for block in layers:
            for name, module in list(block.named_modules()):
                own = self.of_layer(name, module) if isinstance(module, Linear) else None
                if own is not None:
                    module._modules["image_rows"] = own


class ImageExperts(ImageRowsConfig, frozen=True, kw_only=True):
    """Each has another weight."""

    qkv_bias: bool
    """Whether that of queries, keys and values has a bias with it."""

    def of_layer(self, name: str, linear: Linear) -> ImageRows | None:
        return ExpertRows(linear, bias=self.qkv_bias and name == "attn.qkv")
