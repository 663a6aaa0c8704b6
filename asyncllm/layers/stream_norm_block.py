"""The block with norms of the residual stream, as the first transformers had them."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.block import Block
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["StreamNormBlock"]


class StreamNormBlock(Block):
    """Norms of the stream behind each addition (OPT-350M): x = norm(x + attn(x)); x = norm(x + mlp(x)).

    The stream that it returns is a norm's, so that the branch is nothing.
    """

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        if branch is not None:
            residual = residual + branch
        attended = self.attn(residual, step, sampled)
        if sampled is not None:
            residual, step = kernels.gather_rows(residual, sampled.indices), sampled.inputs
        stream, _ = self.attn_norm.add(attended, residual)
        stream, _ = self.mlp_norm.add(self.mlp(stream, step), stream)
        return torch.zeros_like(stream), stream
