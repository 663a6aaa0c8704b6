"""Where ranks' shares of a sum are added up: by the layer that computed them, or by the norm that follows it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from asyncllm.distributed.group import RankGroup
from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block
from asyncllm.layers.chunked_attention import ChunkedAttention
from asyncllm.layers.gated_attention import GatedAttention
from asyncllm.layers.latent_attention import LatentAttention
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.mlp import GatedMLP, PlainMLP
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import OffsetRMSNorm, RMSNorm

__all__ = ["sum_in_norms"]

# A subclass may do more to the sum.
_NORMS = (RMSNorm, OffsetRMSNorm)
_ATTENTION = (Attention, ChunkedAttention, GatedAttention, LatentAttention)


def sum_in_norms(blocks: Sequence[nn.Module], last: nn.Module, group: RankGroup) -> None:
    """Have the norms of divided `blocks`, and the `last` one behind them, add up what the ranks' branches in front of
    them give, where nothing lies between.

    What is in front of the last block is added up by the layer that it comes from, as callers want the stream there.
    """
    for index, block in enumerate(blocks):
        if type(block) is not Block or block.scale is not None:
            continue
        _sum_in(block.mlp_norm, block.attn, group)
        following = blocks[index + 1] if index + 1 < len(blocks) else None
        if following is None:
            _sum_in(last, block.mlp, group)
        elif type(following) is Block and index + 2 < len(blocks):
            _sum_in(following.attn_norm, block.mlp, group)


def _sum_in(norm: nn.Module, branch: nn.Module, group: RankGroup) -> None:
    """Have the norm add up what ends in the branch, if there is such a norm and all that ends there is shares."""
    products = _last_products(branch)
    if (
        isinstance(norm, RMSNorm)
        and type(norm) in _NORMS
        and products
        and all(product.is_summed for product in products)
    ):
        norm.ranks = group
        for product in products:
            product.summed_later = True


def _last_products(branch: nn.Module) -> list[Weighted]:
    """Return the products whose sum the branch gives as it is; none where that is not known."""
    if type(branch) in _ATTENTION:
        return [branch.out]  # type: ignore[list-item]
    if type(branch) in (GatedMLP, PlainMLP):
        return [branch.down]  # type: ignore[list-item]
    if type(branch) is MoE:
        return [branch.down, *([] if branch.shared is None else [branch.shared.down])]
    return []
