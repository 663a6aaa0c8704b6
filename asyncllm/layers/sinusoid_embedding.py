"""Embeddings of tokens with sinusoids of their positions added."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncllm.layers.embedding import Embedding
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["SinusoidEmbedding"]


class SinusoidEmbedding(Embedding):
    """Like `Embedding`, plus sines of the token's position at falling frequencies, then cosines (Vaswani et al., 2017);
    position p counts as p + offset."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float | None = None, offset: int = 0) -> None:
        super().__init__(vocab_size, hidden_size, scale=scale)
        self.offset = offset

    def forward(self, ids: Tensor, step: StepInputs) -> Tensor:
        rows = super().forward(ids, step)
        half = rows.shape[-1] // 2
        frequencies = torch.exp(torch.arange(half, device=ids.device) * (-math.log(10000) / (half - 1)))
        angles = (step.positions + self.offset)[:, None] * frequencies
        return rows + torch.cat([angles.sin(), angles.cos()], -1).to(rows.dtype)
