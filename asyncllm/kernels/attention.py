"""Attention over pages: decode (one query per row, batched over rows) and prefill (many queries per row).

Both are exact softmax attention with grouped query heads: query head h reads KV head h // (H / K). A key at position j
is visible to a query at position p iff j <= p and, with a window, p - j < window. Softcap squashes scores to
cap * tanh(score / cap) before the mask (Gemma 2). The softmax is taken in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.cache import PagedKV, head_offsets

__all__ = ["DecodePlan", "paged_decode_attention", "paged_prefill_attention", "plan_decode_attention"]

DECODE_TILE = 2**20
"""Most numbers of K gathered at a time: 4 MiB in float32, which stays in the caches of two cores. A layer of 64 rows of
150 tokens, 2 KV heads of 64: 1.09 ms of one core in tiles of 2**20, 1.21 ms of 2**18."""

GATHER_LINES = 1024
"""Up to this many lines of keys, keys and values are gathered for torch's own attention: fewer calls, and the copy is
small."""

QUERY_TILE = 512
"""Most query rows of a prefill scored at a time; bounds the mask and skips keys that no query of the tile sees."""


class DecodePlan(NamedTuple):
    """Where decode attention finds its keys and values: all that depends on the batch and the window, not the layer."""

    lines: Tensor
    """[2, B * K, width] int64: for each row and KV head the lines (`PagedKV.lines`) of its keys, and of its values."""
    bias: Tensor | None
    """[B * K, 1, width] float32: -inf at lines that the row does not see; None when it sees them all."""


def plan_decode_attention(
    block_tables: Tensor, kv_lens: Tensor, cache: PagedKV, *, window: int | None = None
) -> DecodePlan:
    """The plan of one step for all layers with a cache of this shape and with this window.

    block_tables [B, N] integers, kv_lens [B] integers >= 1, the query's own token included.
    """
    num_blocks, num_kv_heads, block_size, _ = cache.k.shape
    kv_lens = kv_lens.long()
    shortest, longest = (int(bound) for bound in kv_lens.aminmax())
    width = longest if window is None else min(window, longest)
    positions = torch.arange(width, device=kv_lens.device).expand(len(kv_lens), -1)
    if width < longest:
        positions = positions + (kv_lens - width).clamp_(min=0)[:, None]
    pages = positions.div(block_size, rounding_mode="floor").clamp_(max=block_tables.shape[1] - 1)
    blocks = block_tables.gather(1, pages).long()
    first = positions.remainder(block_size).add_(blocks, alpha=num_kv_heads * block_size)
    heads = head_offsets(num_blocks, num_kv_heads, block_size, kv_lens.device).view(2, 1, num_kv_heads, 1)
    lines = first[:, None] + heads
    bias = None
    if shortest < width:
        bias = torch.where(positions < kv_lens[:, None], 0.0, float("-inf")).repeat_interleave(num_kv_heads, 0)[:, None]
    return DecodePlan(lines.view(2, -1, width), bias)


def paged_decode_attention(
    q: Tensor, cache: PagedKV, plan: DecodePlan, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The last token of each row against what the plan shows it of the row's context. q [B, H, D] -> [B, H, D]."""
    head_dim = q.shape[-1]
    _, num_lists, width = plan.lines.shape
    grouped = q.reshape(num_lists, -1, head_dim)
    if softcap is None and num_lists * width <= GATHER_LINES:
        both = cache.lines.index_select(0, plan.lines.view(-1)).view(2, 1, num_lists, width, head_dim)
        bias = None if plan.bias is None else plan.bias.to(q.dtype)
        attended = F.scaled_dot_product_attention(grouped[None], both[0], both[1], attn_mask=bias, scale=scale)
        return attended.reshape(q.shape)
    tile = max(1, DECODE_TILE // (width * head_dim))
    outputs = []
    for first in range(0, num_lists, tile):
        lists = slice(first, first + tile)
        key_lines, value_lines = plan.lines[:, lists]
        k = cache.lines.index_select(0, key_lines.reshape(-1)).view(-1, width, head_dim).transpose(1, 2)
        bias = None if plan.bias is None else plan.bias[lists].to(q.dtype)
        if softcap is not None:
            scores = torch.bmm(grouped[lists], k).mul_(scale / softcap).tanh_().mul_(softcap)
            scores = scores if bias is None else scores.add_(bias)
        elif bias is not None:
            scores = torch.baddbmm(bias, grouped[lists], k, alpha=scale)
        else:
            scores = torch.bmm(grouped[lists], k).mul_(scale)
        weights = scores.softmax(-1, torch.float32).to(q.dtype)
        # A bag is a weighted sum of lines: it reads V in place, where a matmul needs the lines gathered first.
        bags = value_lines[:, None].expand(-1, grouped.shape[1], -1).reshape(-1, width)
        outputs.append(F.embedding_bag(bags, cache.lines, mode="sum", per_sample_weights=weights.view(-1, width)))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.view(q.shape)


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

    q [T, H, D]; row b owns queries q_offsets[b] to q_offsets[b + 1] ([B + 1] integers), and its query i sits at
    position kv_lens[b] - (number of its queries) + i; block_tables [B, N] integers, kv_lens [B] integers -> [T, H, D].
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
        for part in (cache.k, cache.v)
    )
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
