"""Layers with two attentions, whose experts run beside the second one (LongCat-Flash)."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.block import Block, BlockParts
from asyncllm.layers.latent_attention import LatentAttention
from asyncllm.layers.moe import Correction, ExactRouter, MoE
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["IdentityMoE", "ScaledLatentAttention", "ShortcutBlock"]


class ShortcutBlock(Block):
    """x += attn(norm(x)); y = norm(x); x += dense(y); then the block `second`, after whose branches mlp(y) is added."""

    def __init__(self, *, dense: nn.Module, second: Block, **parts: Unpack[BlockParts]) -> None:
        super().__init__(**parts)
        self.dense, self.second = dense, second

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Block.forward`."""
        if branch is None:
            normed = self.attn_norm(residual)
        else:
            normed, residual = self.attn_norm.add(branch, residual)
        normed, residual = self.mlp_norm.add(self.attn(normed, step), residual)
        rows = normed if sampled is None else kernels.gather_rows(normed, sampled.indices)
        shortcut = self.mlp(rows, step if sampled is None else sampled.inputs)
        branch, residual = self.second(self.dense(normed, step), residual, step, sampled)
        return branch.add_(shortcut), residual


class IdentityMoE(MoE):
    """Like `MoE`, with `num_identities` further experts that return their input. They have no weights, and the highest
    ids."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, num_identities: int, **options: Any) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.num_computing = options["num_experts"]
        count = self.num_computing + num_identities
        self.router = ExactRouter(hidden_size, count, shard="replicated")
        self.correction = Correction(count)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        weights, expert_ids = self._route(x, step)
        identities = expert_ids >= self.num_computing
        computed = self._of_experts(
            x, weights.masked_fill(identities, 0.0), expert_ids.masked_fill(identities, -1), step
        )
        kept = weights.masked_fill(~identities, 0.0).sum(-1, keepdim=True)
        return computed.add_((x * kept).to(x.dtype))


class ScaledLatentAttention(LatentAttention):
    """Like `LatentAttention`, with normed latents multiplied by `latent_scale`."""

    def __init__(self, layer: int, hidden_size: int, *, latent_scale: float, **sizes: Any) -> None:
        super().__init__(layer, hidden_size, **sizes)
        self.latent_scale = latent_scale

    @property
    def latent_weight(self) -> Tensor:
        return self.kv_norm.weight.float() * self.latent_scale
