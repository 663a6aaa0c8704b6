"""Transformer blocks: how attention and MLP join the residual stream.

A block takes the residual stream together with the last branch's output, which still has to be added to it, so that the
addition and the next norm are one op.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import RoundedRows
from asyncllm.layers.attention import Attention
from asyncllm.layers.joint_mixers import JointMixers
from asyncllm.layers.latent_attention import LatentAttention
from asyncllm.layers.layer import Layer
from asyncllm.layers.norm import Norm
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = [
    "AnyAttention",
    "AnyBlock",
    "Block",
    "BlockParts",
    "ParallelBlock",
    "PostNormBlock",
    "SandwichBlock",
    "SandwichParts",
    "ScaledStreamBlock",
    "SingleBlock",
    "StreamNormBlock",
]

AnyAttention = Attention | LatentAttention | StateLayer


class BlockParts(TypedDict):
    """The parts of a `Block`."""

    attn_norm: Norm
    attn: AnyAttention | JointMixers
    mlp_norm: Norm
    mlp: nn.Module
    scale: NotRequired[float | None]


class SandwichParts(BlockParts):
    """The parts of a `SandwichBlock`."""

    attn_post_norm: Norm
    mlp_post_norm: Norm


class Block(Layer):
    """Pre-norm: x += attn(norm(x)); x += mlp(norm(x)). `mlp` maps [T, hidden] to [T, hidden]; `scale` multiplies each
    branch's output."""

    def __init__(
        self,
        *,
        attn_norm: Norm,
        attn: AnyAttention | JointMixers,
        mlp_norm: Norm,
        mlp: nn.Module,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """residual and branch [T, hidden], branch None in the first block -> (branch, residual) for the next block;
        only the `sampled` rows if given."""
        if branch is None:
            normed = self.attn_norm(residual)
        else:
            normed, residual = _normed(self.attn_norm, branch, residual, self.attn, step)
        attended = self._attention_branch(normed, step, sampled)
        if self.scale is not None:
            attended.mul_(self.scale)
        if sampled is not None:
            residual, step = kernels.gather_rows(residual, sampled.indices), sampled.inputs
        normed, residual = _normed(self.mlp_norm, attended, residual, self.mlp, step)
        fed = self._mlp_branch(normed, residual, step)
        return fed if self.scale is None else fed.mul_(self.scale), residual

    def _attention_branch(self, normed: Tensor | RoundedRows, step: StepInputs, sampled: SampledRows | None) -> Tensor:
        """Return the output of attention for the normed stream."""
        attended: Tensor = self.attn(normed, step, sampled)
        return attended

    def _mlp_branch(self, normed: Tensor | RoundedRows, residual: Tensor, step: StepInputs) -> Tensor:
        """Return the MLP's output for the normed stream. `residual` is the stream itself."""
        fed: Tensor = self.mlp(normed, step)
        return fed


def _normed(
    norm: Norm, branch: Tensor, residual: Tensor, layer: nn.Module, step: StepInputs
) -> tuple[Tensor | RoundedRows, Tensor]:
    """Return the norm of residual + branch, rounded if `layer`, which reads it, takes rounded rows, and residual +
    branch."""
    rounding = layer.rounding(step) if isinstance(layer, Layer) else None
    return norm.add(branch, residual) if rounding is None else norm.add_rounded(branch, residual, rounding)


class PostNormBlock(Layer):
    """Norms only after each branch (OLMo 2): x += norm(attn(x)); x += norm(mlp(x))."""

    def __init__(self, *, attn: AnyAttention, attn_post_norm: Norm, mlp: nn.Module, mlp_post_norm: Norm) -> None:
        super().__init__()
        self.attn = attn
        self.attn_post_norm = attn_post_norm
        self.mlp = mlp
        self.mlp_post_norm = mlp_post_norm

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Block.forward`."""
        if branch is not None:
            residual = residual + branch
        attended = self.attn_post_norm(self.attn(residual, step, sampled))
        if sampled is not None:
            residual, step = kernels.gather_rows(residual, sampled.indices), sampled.inputs
        residual = residual + attended
        return self.mlp_post_norm(self.mlp(residual, step)), residual


class SandwichBlock(Block):
    """Norms before and after each branch (Gemma 2): x += norm(attn(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, *, attn_post_norm: Norm, mlp_post_norm: Norm, **parts: Unpack[BlockParts]) -> None:
        super().__init__(**parts)
        self.attn_post_norm = attn_post_norm
        self.mlp_post_norm = mlp_post_norm

    def _attention_branch(self, normed: Tensor | RoundedRows, step: StepInputs, sampled: SampledRows | None) -> Tensor:
        attended: Tensor = self.attn_post_norm(super()._attention_branch(normed, step, sampled))
        return attended

    def _mlp_branch(self, normed: Tensor | RoundedRows, residual: Tensor, step: StepInputs) -> Tensor:
        fed: Tensor = self.mlp_post_norm(super()._mlp_branch(normed, residual, step))
        return fed


class ParallelBlock(Layer):
    """Both branches read the incoming stream (GPT-J): x += attn(norm(x)) + mlp(norm(x)).

    With `mlp_norm` None, the MLP shares attention's norm.
    """

    def __init__(self, *, attn_norm: Norm, attn: AnyAttention, mlp_norm: Norm | None, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Block.forward`."""
        if branch is None:
            normed = self.attn_norm(residual)
        else:
            normed, residual = self.attn_norm.add(branch, residual)
        attended = self.attn(normed, step, sampled)
        if sampled is not None:
            residual, step = kernels.gather_rows(residual, sampled.indices), sampled.inputs
        if self.mlp_norm is not None:
            normed = self.mlp_norm(residual)
        elif sampled is not None:
            normed = kernels.gather_rows(normed, sampled.indices)
        return self.mlp(normed, step).add_(attended), residual


class StreamNormBlock(Block):
    """Norms of the stream after each addition (OPT-350M): x = norm(x + attn(x)); x = norm(x + mlp(x)).

    It returns the normed stream and an empty branch.
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


class ScaledStreamBlock(StreamNormBlock):
    """Norms of the stream before each branch (MiniMax-Text-01): x = norm(x); x = a x + b attn(x), and the same with the
    MLP. The factors are (a, b)."""

    def __init__(
        self, *, attn_factors: tuple[float, float], mlp_factors: tuple[float, float], **parts: Unpack[BlockParts]
    ) -> None:
        super().__init__(**parts)
        self.attn_factors, self.mlp_factors = attn_factors, mlp_factors

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Block.forward`."""
        stream = self.attn_norm(residual) if branch is None else self.attn_norm.add(branch, residual)[0]
        attended = self.attn(stream, step, sampled)
        if sampled is not None:
            stream, step = kernels.gather_rows(stream, sampled.indices), sampled.inputs
        kept, added = self.attn_factors
        stream, _ = self.mlp_norm.add(attended * added, stream * kept)
        kept, added = self.mlp_factors
        return self.mlp(stream, step) * added, stream * kept


class SingleBlock(Layer):
    """A single branch (Nemotron-H): x += attn(norm(x)), or x += mlp(norm(x))."""

    def __init__(self, *, norm: Norm, attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.attn = attn
        self.mlp = mlp

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Block.forward`."""
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


AnyBlock = Block | PostNormBlock | ParallelBlock | SingleBlock
