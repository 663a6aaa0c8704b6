"""Where ranks' partial results are summed: in the layer that computed them, or in the norm that follows."""

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
from asyncllm.layers.narrow_values import NarrowValueAttention
from asyncllm.layers.norm import OffsetRMSNorm, RMSNorm
from asyncllm.layers.sparse_latent_attention import SparseLatentAttention

__all__ = ["sum_in_norms"]

# A subclass may do more with the sum.
_NORMS = (RMSNorm, OffsetRMSNorm)
_ATTENTION = (
    Attention,
    ChunkedAttention,
    GatedAttention,
    LatentAttention,
    NarrowValueAttention,
    SparseLatentAttention,
)


def sum_in_norms(blocks: Sequence[nn.Module], last: nn.Module, group: RankGroup) -> None:
    """Let the norms of divided `blocks`, and the `last` norm after them, sum the partial results of the preceding
    branches, if nothing lies between.

    The layer itself sums the branch before the last block, because callers need the stream there.
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
    """Let the norm sum the branch's output, if there is such a norm and the output consists only of partial results."""
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
    """Return the products whose sum is the branch's unchanged output; empty if that is unknown."""
    if type(branch) in _ATTENTION:
        return [branch.out]  # type: ignore[list-item]
    if type(branch) is GatedMLP or type(branch) is PlainMLP:
        return [branch.down]
    if type(branch) is MoE:
        return [branch.down, *([] if branch.shared is None else [branch.shared.down])]
    return []
