"""Heads that score a sequence: for labels, or as a reward."""

from __future__ import annotations

from torch import Tensor

from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear

__all__ = ["ScoreHead"]


class ScoreHead(Layer):
    """hidden states [R, hidden] after the final norm -> scores [R, labels], in float32."""

    def __init__(self, hidden_size: int, num_labels: int, *, inner: bool, bias: bool) -> None:
        """`inner`: precede the head by a layer of the same width with relu (Qwen2.5-Math-RM)."""
        super().__init__()
        self.inner = Linear(hidden_size, hidden_size, shard="replicated", bias=True) if inner else None
        self.out = Linear(hidden_size, num_labels, shard="replicated", bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.inner is not None:
            hidden = self.inner.method.product(self.inner, hidden).relu_()
        return self.out.method.product(self.out, hidden).float()
