"""A transformer block that several layers share, and the layers around it (Zamba 2).

The block reads the stream beside the tokens' embeddings. Each use has its own cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.block import SingleBlock
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import Norm
from asyncllm.layers.shared_weights import SharedAttention, SharedMLP
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["HybridBlock", "SharedBlock"]


class SharedBlock(Layer):
    """One use of a shared block: x [T, in_features] -> mlp(norm(attn(norm(x)))) [T, hidden]."""

    def __init__(self, *, attn_norm: Norm, attn: SharedAttention, mlp_norm: Norm, mlp: SharedMLP) -> None:
        super().__init__()
        self.attn_norm, self.attn = attn_norm, attn
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        attended = self.attn(self.attn_norm(x), step)
        out: Tensor = self.mlp(self.mlp_norm(attended), step)
        return out


class HybridBlock(SingleBlock):
    """x += state(norm(x + linear(shared(x beside the embeddings))))."""

    attn: StateLayer

    def __init__(self, *, norm: Norm, attn: StateLayer, shared: SharedBlock, hidden_size: int) -> None:
        super().__init__(norm=norm, attn=attn)
        self.shared = shared
        self.linear = Linear(hidden_size, hidden_size, shard="replicated")

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Block.forward`. The state needs the shared block's output for all tokens, sampled or not."""
        assert step.layer_inputs is not None, "the model writes them before its first layer"
        if branch is not None:
            residual = residual + branch
        shared = self.shared(torch.cat([residual, step.layer_inputs[:, 0]], -1), step)
        normed, _ = self.norm.add(self.linear(shared, step), residual)
        stated = self.attn(normed, step, sampled)
        if sampled is not None:
            residual = kernels.gather_rows(residual, sampled.indices)
        return stated, residual
