"""Attention over pages: decode (one query per row, batched over rows) and prefill (many queries per row).

Both are exact softmax attention with grouped query heads: query head h reads KV head h // (H / K). A key at position j
is visible to a query at position p iff j <= p and, with a window, p - j < window. Softcap squashes scores to
cap * tanh(score / cap) before the mask (Gemma 2). Scores and softmax are float32 unless torch's own attention runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.cache import PagedKV

__all__ = ["DecodePlan", "paged_decode_attention", "paged_prefill_attention", "plan_decode_attention"]

DECODE_TILE = 2**20
"""Most numbers of K gathered at a time: 4 MiB in float32, which stays in the caches of two cores. 64 rows of 150 tokens,
2 KV heads of 64, 8 layers, block_size 64: 5.9 ms in tiles of 32 rows and more, 8.2 ms in tiles of 8, 17.7 ms of 2."""

QUERY_TILE = 512
"""Most query rows of a prefill scored at a time; bounds the mask and skips keys that no query of the tile sees."""


class DecodePlan(NamedTuple):
    """Where decode attention finds its keys: what depends on the batch and the window, but not on the layer."""

    lines: Tensor
    """[B, K, width] int64: index of each visible key's line in a layer's pages, seen as [blocks * K * block_size, D]."""
    bias: Tensor | None
    """[B, 1, 1, width] float32: -inf where a row has no key; None when every row has `width` keys."""


def plan_decode_attention(
    block_tables: Tensor, kv_lens: Tensor, *, num_kv_heads: int, block_size: int, window: int | None = None
) -> DecodePlan:
    """The plan of one step, for every layer with this window.

    block_tables [B, N] integers, kv_lens [B] integers >= 1, the query's own token included.
    """
    kv_lens = kv_lens.long()
    shortest, longest = (int(bound) for bound in kv_lens.aminmax())
    width = longest if window is None else min(window, longest)
    steps = torch.arange(width, device=kv_lens.device)
    if window is None:
        positions = steps.expand(len(kv_lens), -1)
    else:
        positions = steps + (kv_lens - window).clamp_(min=0)[:, None]
    pages = positions.div(block_size, rounding_mode="floor").clamp_(max=block_tables.shape[1] - 1)
    slots = block_tables.long().gather(1, pages).mul_(num_kv_heads * block_size).add_(positions.remainder(block_size))
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=kv_lens.device)
    lines = slots[:, None, :] + heads[:, None]
    if shortest >= width:
        return DecodePlan(lines, None)
    hidden = positions >= kv_lens[:, None]
    bias = torch.zeros(hidden.shape, device=kv_lens.device).masked_fill_(hidden, float("-inf"))
    return DecodePlan(lines, bias[:, None, None])


def paged_decode_attention(
    q: Tensor, cache: PagedKV, plan: DecodePlan, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The last token of each row against what the plan lets it see of the row's context. q [B, H, D] -> [B, H, D]."""
    head_dim = cache.k.shape[-1]
    batch, num_heads, _ = q.shape
    _, num_kv_heads, width = plan.lines.shape
    group = num_heads // num_kv_heads
    keys = cache.k.view(-1, head_dim)
    values = cache.v.view(-1, head_dim)
    tile = max(1, DECODE_TILE // (num_kv_heads * width * head_dim))
    outputs = []
    for first in range(0, batch, tile):
        rows = slice(first, first + tile)
        lines = plan.lines[rows].view(-1, width)
        k = keys.index_select(0, lines.view(-1)).view(-1, width, head_dim)
        scores = torch.bmm(q[rows].reshape(-1, group, head_dim), k.transpose(1, 2)).float().mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if plan.bias is not None:
            scores.view(-1, num_kv_heads, group, width).add_(plan.bias[rows])
        weights = scores.softmax(-1).to(q.dtype)
        # A bag is a sum of weighted lines of V: it reads the pages in place, where a matmul needs them gathered first.
        bags = lines[:, None, :].expand(-1, group, -1).reshape(-1, width)
        summed = F.embedding_bag(bags, values, mode="sum", per_sample_weights=weights.view(-1, width))
        outputs.append(summed.view(-1, num_heads, head_dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
    _, num_kv_heads, block_size, _ = cache.k.shape
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    output = torch.empty_like(q)
    offsets = q_offsets.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        start, end = offsets[row], offsets[row + 1]
        first_position = kv_len - (end - start)
        for first in range(start, end, QUERY_TILE):
            last = min(first + QUERY_TILE, end)
            low_position, high_position = first_position + first - start, first_position + last - start
            low_page = 0 if window is None else max(0, low_position - window + 1) // block_size
            pages = block_tables[row, low_page : -(-high_position // block_size)].long()
            lines = (pages * num_kv_heads + heads).view(-1)
            low_key = low_page * block_size
            k, v = (
                part.flatten(0, 1).index_select(0, lines).view(num_kv_heads, -1, part.shape[-1])[:, : high_position - low_key]
                for part in cache
            )
            output[first:last] = _attend(q[first:last], k, v, low_position - low_key, scale, window, softcap)
    return output


def _attend(
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
    scores = torch.matmul(grouped, k[:, None].transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if visible is None:
        visible = torch.ones(tokens, length, dtype=torch.bool, device=q.device).tril_()
    weights = scores.masked_fill_(~visible, float("-inf")).softmax(-1).to(v.dtype)
    return torch.matmul(weights, v[:, None]).permute(2, 0, 1, 3).reshape(q.shape)
