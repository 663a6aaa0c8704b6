"""Attention over pages: decode (one query per row, batched over rows) and prefill (many queries per row).

Both are exact softmax attention with grouped query heads: query head h reads KV head h // (H / K). A key at position j
is visible to a query at position p iff j <= p and, with a window, p - j < window. Softcap squashes scores to
cap * tanh(score / cap) before the mask (Gemma 2). The softmax is taken in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.cache import PagedKV

__all__ = ["paged_decode_attention", "paged_prefill_attention"]

DECODE_TILE = 2**20
"""Most numbers of K gathered at a time: 4 MiB in float32, which stays in the caches of two cores. A layer of 64 rows of
150 tokens, 2 KV heads of 64: 1.09 ms of one core in tiles of 2**20, 1.21 ms of 2**18."""

QUERY_TILE = 512
"""Most query rows of a prefill scored at a time; bounds the mask and skips keys that no query of the tile sees."""


def paged_decode_attention(
    q: Tensor,
    cache: PagedKV,
    block_tables: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The last token of each row against the row's whole context.

    q [B, H, D], block_tables [B, N] integers, kv_lens [B] integers >= 1 (the query's own token included) -> [B, H, D].
    """
    batch, num_heads, head_dim = q.shape
    if batch == 1:
        return _attend_row(q, cache, block_tables[0], int(kv_lens[0]), 1, scale, window, softcap)
    num_kv_heads, block_size = cache.k.shape[1:3]
    group = num_heads // num_kv_heads
    pages, positions, hidden = _visible_pages(block_tables, kv_lens, block_size, window)
    # A line is one position of one KV head: a row of the cache seen as [blocks * kv_heads * block_size, head_dim].
    page_lines = torch.arange(num_kv_heads * block_size, device=q.device).view(num_kv_heads, 1, block_size)
    lines = (pages * (num_kv_heads * block_size))[:, None, :, None] + page_lines
    lines = lines.view(batch, num_kv_heads, -1)[..., :positions].contiguous()
    bias = torch.where(hidden[:, :positions], float("-inf"), 0.0).to(q.dtype)
    keys, values = (part.view(-1, head_dim) for part in cache)
    output = torch.empty_like(q)
    tile = max(1, DECODE_TILE // (num_kv_heads * positions * head_dim))
    for first in range(0, batch, tile):
        rows = slice(first, first + tile)
        tile_lines = lines[rows].view(-1, 1, positions)
        k = keys.index_select(0, tile_lines.view(-1)).view(-1, positions, head_dim)
        grouped = q[rows].reshape(-1, group, head_dim)
        tile_bias = bias[rows].repeat_interleave(num_kv_heads, 0)[:, None]
        if softcap is None:
            scores = torch.baddbmm(tile_bias, grouped, k.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap).add_(tile_bias)
        weights = scores.softmax(-1, torch.float32).to(q.dtype).view(-1, positions)
        # A bag is a weighted sum of lines: it reads V in place, where a matmul needs the lines gathered first.
        bags = tile_lines.expand(-1, group, -1).reshape(-1, positions)
        summed = F.embedding_bag(bags, values, mode="sum", per_sample_weights=weights)
        output[rows] = summed.view(-1, num_heads, head_dim)
    return output


def _visible_pages(
    block_tables: Tensor, kv_lens: Tensor, block_size: int, window: int | None
) -> tuple[Tensor, int, Tensor]:
    """The pages that a decode step reads: (pages [B, P] int64, how many of their P * block_size positions, counted from
    the first page's, any row reads, hidden [B, P * block_size] bool: positions that the row does not see)."""
    kv_lens = kv_lens.long()
    longest = int(kv_lens.max())
    num_pages = -(-longest // block_size)
    steps = torch.arange(num_pages * block_size, device=kv_lens.device)
    if window is None or window >= longest:
        return block_tables[:, :num_pages].long(), longest, steps >= kv_lens[:, None]
    # A window that begins inside a page touches one page more than it fills.
    num_pages = min(num_pages, (window - 2) // block_size + 2)
    steps = steps[: num_pages * block_size]
    lowest = (kv_lens - window).clamp_(min=0)
    first_pages = lowest.div(block_size, rounding_mode="floor").clamp_(max=block_tables.shape[1] - num_pages)
    pages = block_tables.long().gather(1, first_pages[:, None] + steps[:num_pages])
    positions = first_pages[:, None] * block_size + steps
    return pages, steps.shape[0], (positions >= kv_lens[:, None]) | (positions < lowest[:, None])


def paged_prefill_attention(
    q: Tensor,
    cache: PagedKV,
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The last tokens of each row, causally, against the row's whole context.

    q [T, H, D]; row b owns queries q_offsets[b] to q_offsets[b + 1] ([B + 1] integers), and its query i sits at position
    kv_lens[b] - (number of its queries) + i; block_tables [B, N] integers, kv_lens [B] integers -> [T, H, D].
    """
    output = torch.empty_like(q)
    offsets = q_offsets.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        start, end = offsets[row], offsets[row + 1]
        for first in range(start, end, QUERY_TILE):
            last = min(first + QUERY_TILE, end)
            output[first:last] = _attend_row(
                q[first:last], cache, block_tables[row], kv_len - (end - last), last - first, scale, window, softcap
            )
    return output


def _attend_row(
    q: Tensor,
    cache: PagedKV,
    block_table: Tensor,
    kv_len: int,
    q_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The queries q [q_len, H, D] at positions kv_len - q_len to kv_len - 1 of one row, with its blocks [N]."""
    num_kv_heads, block_size, head_dim = cache.k.shape[1:]
    lowest = 0 if window is None else max(0, kv_len - q_len - window + 1)
    first_page = lowest // block_size
    skipped = first_page * block_size
    pages = block_table[first_page : -(-kv_len // block_size)].long()
    lines = (pages * num_kv_heads + torch.arange(num_kv_heads, device=q.device)[:, None]).view(-1)
    k, v = (
        part.view(-1, block_size, head_dim)
        .index_select(0, lines)
        .view(num_kv_heads, -1, head_dim)[:, lowest - skipped : kv_len - skipped]
        for part in cache
    )
    if q_len == 1:
        # One query sees every key left: the query heads of a group take the place of queries, and no mask is needed.
        grouped = q.view(num_kv_heads, -1, head_dim)
        if softcap is None:
            return F.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale).view(q.shape)
        scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap)
        return torch.bmm(scores.softmax(-1, torch.float32).to(v.dtype), v).view(q.shape)
    return _attend_causally(q, k, v, kv_len - q_len - lowest, scale, window, softcap)


def _attend_causally(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """q [T, H, D] at positions first, first + 1, ... against k and v [K, S, D] at positions 0, 1, ... -> [T, H, D]."""
    tokens, num_heads, _ = q.shape
    num_kv_heads, length, _ = k.shape
    group = num_heads // num_kv_heads
    visible = None
    if first > 0 or window is not None:
        distance = torch.arange(first, first + tokens, device=q.device)[:, None] - torch.arange(length, device=q.device)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if softcap is None:
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
            enable_gqa=group > 1,
        )
        return attended[0].transpose(0, 1)
    grouped = q.view(tokens, num_kv_heads, group, -1).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, k[:, None].transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if visible is None:
        visible = torch.ones(tokens, length, dtype=torch.bool, device=q.device).tril_()
    weights = scores.masked_fill_(~visible, float("-inf")).softmax(-1, torch.float32).to(v.dtype)
    return torch.matmul(weights, v[:, None]).permute(2, 0, 1, 3).reshape(q.shape)
