"""Transformer blocks: how attention and MLP join the residual stream.

A block takes the residual stream and the last branch's output that is still to be added to it, so that the addition and
the next norm are one op.
"""

from __future__ import annotations

from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import PagedKV, Rotation
from asyncllm.layers.attention import Attention
from asyncllm.layers.layer import Layer
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["Block", "SandwichBlock"]


def _rows(residual: Tensor, sampled: SampledRows | None) -> Tensor:
    return residual if sampled is None else kernels.gather_rows(residual, sampled.indices)


class Block(Layer):
    """Pre-norm: x += attn(norm(x)); x += mlp(norm(x)). `mlp` maps [T, hidden] to [T, hidden]."""

    def __init__(self, *, attn_norm: RMSNorm, attn: Attention, mlp_norm: RMSNorm, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        branch: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        inputs: StepInputs,
        cache: PagedKV,
        sampled: SampledRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """residual and branch [T, hidden]; branch is None in the first block. -> (branch, residual) for the next, of
        the `sampled` rows alone if they are given."""
        if branch is None:
            normed = self.attn_norm(residual)
        else:
            normed, residual = self.attn_norm.add(branch, residual)
        attended = self.attn(normed, rotation, inputs, cache, sampled)
        normed, residual = self.mlp_norm.add(attended, _rows(residual, sampled))
        return self.mlp(normed), residual


class SandwichBlock(Block):
    """Norms before and after each branch (Gemma 2): x += norm(attn(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(
        self,
        *,
        attn_norm: RMSNorm,
        attn: Attention,
        attn_post_norm: RMSNorm,
        mlp_norm: RMSNorm,
        mlp: nn.Module,
        mlp_post_norm: RMSNorm,
    ) -> None:
        super().__init__(attn_norm=attn_norm, attn=attn, mlp_norm=mlp_norm, mlp=mlp)
        self.attn_post_norm = attn_post_norm
        self.mlp_post_norm = mlp_post_norm

    def forward(
        self,
        branch: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        inputs: StepInputs,
        cache: PagedKV,
        sampled: SampledRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        if branch is None:
            normed = self.attn_norm(residual)
        else:
            normed, residual = self.attn_norm.add(branch, residual)
        attended = self.attn_post_norm(self.attn(normed, rotation, inputs, cache, sampled))
        normed, residual = self.mlp_norm.add(attended, _rows(residual, sampled))
        return self.mlp_post_norm(self.mlp(normed)), residual
