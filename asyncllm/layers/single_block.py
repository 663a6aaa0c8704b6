"""A layer of attention or of an MLP alone."""

from __future__ import annotations

from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.norm import Norm
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["SingleBlock"]


class SingleBlock(Layer):
    """One branch alone (Nemotron-H): x += attn(norm(x)), or x += mlp(norm(x))."""

    def __init__(self, *, norm: Norm, attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.attn = attn
        self.mlp = mlp

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Block.forward`."""
        if branch is None:
            normed = self.norm(residual)
        else:
            normed, residual = self.norm.add(branch, residual)
        if self.attn is not None:
            normed = self.attn(normed, step, sampled)
        if sampled is not None:
            residual = kernels.gather_rows(residual, sampled.indices)
            if self.attn is None:
                normed, step = kernels.gather_rows(normed, sampled.indices), sampled.inputs
        return normed if self.mlp is None else self.mlp(normed, step), residual
