"""Prompts of latent attention in expanded form: each head's keys and values are computed from the row's lines first.

A product with a key then has as many numbers as the head rather than as a line; this saves more than the expansion
costs if a row has many queries. `kernels.latent` has the other form, and defines the terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.attention import PrefillPlan
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.latent import LatentKV

__all__ = ["expanded_prefill_attention", "gather_lines", "plan_expanded_prefill"]


class _Rows(NamedTuple):
    block_tables: Tensor
    offsets: list[int]
    """[B + 1]: row b owns queries offsets[b] to offsets[b + 1]."""
    keys: list[int]
    """Number of keys of each row."""


@op("latent.expanded:plan_expanded_prefill")
def plan_expanded_prefill(
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    cache: LatentKV,
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
) -> PrefillPlan:
    """Return the plan of one step for all layers with a cache of this shape and `num_heads` query heads.

    block_tables [B, N], q_offsets [B + 1] and kv_lens [B] as in `plan_latent_prefill`; `rows` has the contents of the
    last two as the host needs them: numbers of queries and keys of each row.
    """
    return _Rows(block_tables, q_offsets.tolist(), [keys for _, keys in rows])


@op("latent.expanded:gather_lines")
def gather_lines(pages: Tensor, plan: PrefillPlan, *, rank: int) -> tuple[Tensor, Tensor]:
    """Return the lines of all rows of the plan, row after row: (latents [S, C], rotated keys [S, R]).

    pages [blocks, block_size, C + R], C being `rank`.
    """
    tables, _, keys = _Rows(*plan)
    lines = [
        pages.index_select(0, table[: -(-count // pages.shape[1])].long()).flatten(0, 1)[:count]
        for table, count in zip(tables, keys, strict=True)
    ]
    joined = torch.cat(lines)
    return joined[:, :rank].contiguous(), joined[:, rank:].contiguous()


@op("latent.expanded:expanded_prefill_attention")
def expanded_prefill_attention(
    q: Tensor, kv: Tensor, keys: Tensor, plan: PrefillPlan, *, scale: float, out: Tensor
) -> None:
    """Attend with the last tokens of each row, causally, to the row's whole context; writes out [T, H, V].

    q [T, H, N + R], the last R features rotated; kv [S, H, N + V]: for each line of `gather_lines` a head's unrotated
    key and its value; keys [S, R]: the rotated part of the keys. Tokens outside the plan's rows are neither read nor
    written.
    """
    _, offsets, counts = _Rows(*plan)
    nope = q.shape[-1] - keys.shape[-1]
    first = 0
    for start, end, count in zip(offsets, offsets[1:], counts, strict=False):
        own = slice(first, first + count)
        first += count
        turned = keys[own, None].expand(-1, kv.shape[1], -1)
        k = torch.cat([kv[own, :, :nope], turned], -1).transpose(0, 1)
        visible = (
            torch.arange(count, device=q.device) <= torch.arange(count - (end - start), count, device=q.device)[:, None]
        )
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None], k[None], kv[own, :, nope:].transpose(0, 1)[None],
            attn_mask=visible, scale=scale,
        )  # fmt: skip
        out[start:end] = attended[0].transpose(0, 1)
