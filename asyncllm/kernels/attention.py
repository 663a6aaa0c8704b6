"""Attention over pages: decode (one query per row, batched over rows) and prefill (many queries per row).

Both are exact softmax attention with grouped query heads: query head h reads KV head h // (H / K). A key at position j
is visible to a query at position p iff j <= p and, with a window, p - j < window. A score is computed in this order:

- `scale` multiplies q k^T, and a softcap squashes it to cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118);
- ALiBi adds slope * (j - p), with one slope per query head, float32 [H] (Press et al., arXiv 2108.12409);
- the softmax is computed in float32; sinks, one logit per query head, float32 [H], enter its denominator like one more
  key that has no value (gpt-oss; Xiao et al., arXiv 2309.17453).

Everything that depends only on the step is planned once, and shared by all layers with the same window. A row with
kv_len 0 is padding: none of it is read, and its output is zeros. Decode rows with kv_len -1, after all others, are
absent: they have no token and no output, so that a plan in a CUDA graph serves any number of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.cache import KVCache, head_offsets
from asyncllm.kernels.dispatch import op

__all__ = [
    "DecodePlan",
    "PrefillPlan",
    "paged_decode_attention",
    "paged_joint_attention",
    "paged_prefill_attention",
    "plan_decode_attention",
    "plan_prefill_attention",
]

DECODE_TILE = 2**20
"""Maximum number of elements of K gathered at a time: 4 MiB in float32, which fits the caches of two cores. A layer of
64 rows of 150 tokens with 2 KV heads of 64 takes one core 1.09 ms in tiles of 2**20, 1.21 ms in tiles of 2**18."""

GATHER_LINES = 1024
"""Up to this many lines of keys, keys and values are gathered for torch's own attention: it needs fewer calls, and the
copy is small."""

QUERY_TILE = 512
"""Maximum number of prefill queries scored at a time; bounds the mask, and skips keys that no query of the tile
sees."""

DecodePlan: TypeAlias = tuple[Any, ...]
"""The result of `plan_decode_attention`, for `paged_decode_attention` on the same kind of device. Opaque elsewhere."""

PrefillPlan: TypeAlias = tuple[Any, ...]
"""The result of `plan_prefill_attention`, for `paged_prefill_attention` on the same kind of device."""


class _DecodeLines(NamedTuple):
    """Where decode attention reads its keys and values."""

    num_rows: int
    """B."""
    lines: Tensor
    """[2, B * K, width] int64: for each row and KV head, the lines (`KVCache.lines`) of its keys, and of its values."""
    few_lines: Tensor | None
    """The same, flat; None if there are too many to gather at once."""
    bags: Tensor | None
    """[B * K, G, width] int64: the lines of values, for each query head of a KV head; None if `few_lines` is set."""
    bias: Tensor | None
    """[B * K, 1, width] float32: -inf at lines that the row does not see; None if it sees all."""
    distances: Tensor
    """[B, width] int64: position of the key minus position of the query."""
    padding: Tensor | None
    """[B] bool: rows without keys; None if there are none."""


class _PrefillRows(NamedTuple):
    """The rows of a prefill."""

    block_tables: Tensor
    offsets: list[int]
    """[B + 1]: row b owns queries offsets[b] to offsets[b + 1]."""
    kv_lens: list[int]
    window: int | None
    tile: int
    """Maximum number of queries scored at a time."""


class _Shape(NamedTuple):
    """How scores become weights: arguments shared by all layers of one kind."""

    scale: float
    softcap: float | None
    sinks: Tensor | None
    alibi: Tensor | None


@op("attention.plan:plan_decode_attention")
def plan_decode_attention(
    block_tables: Tensor, kv_lens: Tensor, cache: KVCache, *, num_heads: int, window: int | None = None
) -> DecodePlan:
    """Return the plan of one step for all layers with a cache of this shape, this window, and `num_heads` query heads.

    block_tables [B, N] integers; kv_lens [B] integers, including the query's own token; 0 for padding, -1 for absent
    rows. On a GPU this does not wait for the device, and the plan may be captured in a CUDA graph together with the
    attention that uses it: a replay plans for the current contents of kv_lens and block_tables. Attention stores
    partial sums in the plan, so layers must use it one after another. On a GPU, raises ValueError unless the block size
    is a multiple of 16 and head_dim is one of 8 up to 512.
    """
    num_blocks, num_kv_heads, block_size, _ = cache.k.shape
    kv_lens = kv_lens[: int((kv_lens >= 0).sum())].long()
    block_tables = block_tables[: len(kv_lens)]
    shortest, longest = (int(bound) for bound in kv_lens.aminmax()) if len(kv_lens) else (1, 1)
    width = max(longest if window is None else min(window, longest), 1)
    positions = torch.arange(width, device=kv_lens.device).expand(len(kv_lens), -1)
    if width < longest:
        positions = positions + (kv_lens - width).clamp_(min=0)[:, None]
    # Beyond its end a row reads its last token again: a masked NaN of another sequence would still make its sum NaN.
    read = torch.minimum(positions, (kv_lens - 1).clamp_(min=0)[:, None]) if shortest < width else positions
    pages = read.div(block_size, rounding_mode="floor")
    blocks = block_tables.gather(1, pages).long()
    first = read.remainder(block_size).add_(blocks, alpha=num_kv_heads * block_size)
    heads = head_offsets(num_blocks, num_kv_heads, block_size, kv_lens.device).view(2, 1, num_kv_heads, 1)
    lines = first[:, None] + heads
    bias = None
    if shortest < width:
        bias = torch.where(positions < kv_lens[:, None], 0.0, float("-inf")).repeat_interleave(num_kv_heads, 0)[:, None]
    padding = kv_lens == 0 if shortest == 0 else None
    lines = lines.view(2, -1, width)
    few_lines = lines.view(-1) if lines[0].numel() <= GATHER_LINES else None
    bags = None if few_lines is not None else lines[1][:, None].repeat(1, num_heads // num_kv_heads, 1)
    distances = positions - (kv_lens - 1)[:, None]
    return _DecodeLines(len(kv_lens), lines, few_lines, bags, bias, distances, padding)


@op("attention.decode:paged_decode_attention")
def paged_decode_attention(
    q: Tensor,
    cache: KVCache,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the last token of each row to the part of its context that the plan covers.

    q [T, H, D] -> [T, H, D] in q's dtype. The first tokens are those of the plan's rows that are not absent; tokens
    after them are neither read nor written. sinks and alibi [H] float32. The result is written to `out` if given. On a
    GPU it is identical from run to run.
    """
    lines: _DecodeLines = plan  # type: ignore[assignment]
    rows = lines.num_rows
    if rows == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    present = q if rows == q.shape[0] else q[:rows]
    if lines.few_lines is not None and softcap is None and sinks is None and alibi is None:
        attended = _attend_few_lines(present, cache, lines, lines.few_lines, scale)
    else:
        attended = _attend_lines(present, cache, lines, _Shape(scale, softcap, sinks, alibi))
    if lines.padding is not None:
        attended = attended.masked_fill(lines.padding[:, None, None], 0.0)
    if out is None:
        if present is q:
            return attended
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[:rows] = attended
    return out


def _attend_few_lines(q: Tensor, cache: KVCache, plan: _DecodeLines, few_lines: Tensor, scale: float) -> Tensor:
    _, num_lists, width = plan.lines.shape
    head_dim = q.shape[-1]
    keys, values = cache.read(few_lines, q.dtype).view(2, 1, num_lists, width, head_dim).unbind()
    bias = None if plan.bias is None else plan.bias.to(q.dtype)
    grouped = q.reshape(1, num_lists, -1, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale).view(q.shape)


def _attend_lines(q: Tensor, cache: KVCache, plan: _DecodeLines, shape: _Shape) -> Tensor:
    scale, softcap, sinks, alibi = shape
    head_dim = q.shape[-1]
    _, num_lists, width = plan.lines.shape
    grouped = q.reshape(num_lists, -1, head_dim)
    slopes = None if alibi is None else _per_list(alibi, grouped)
    sink_logits = None if sinks is None else _per_list(sinks, grouped)
    distances = plan.distances.repeat_interleave(num_lists // len(q), 0)[:, None] if alibi is not None else None
    tile = max(1, DECODE_TILE // (width * head_dim))
    bags = plan.lines[1][:, None].expand(-1, grouped.shape[1], -1) if plan.bags is None else plan.bags
    outputs = []
    for first in range(0, num_lists, tile):
        lists = slice(first, first + tile)
        k = cache.read(plan.lines[0, lists].view(-1), q.dtype).view(-1, width, head_dim).transpose(1, 2)
        bias = None if plan.bias is None else plan.bias[lists].to(q.dtype)
        if softcap is not None:
            scores = torch.bmm(grouped[lists], k).mul_(scale / softcap).tanh_().mul_(softcap)
            scores = scores if bias is None else scores.add_(bias)
        elif bias is not None:
            scores = torch.baddbmm(bias, grouped[lists], k, alpha=scale)
        else:
            scores = torch.bmm(grouped[lists], k).mul_(scale)
        if slopes is not None and distances is not None:
            scores = scores + slopes[lists] * distances[lists]
        weights = _softmax(scores, None if sink_logits is None else sink_logits[lists]).to(q.dtype)
        outputs.append(cache.weigh(bags[lists], weights))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.view(q.shape)


def _per_list(values: Tensor, grouped: Tensor) -> Tensor:
    """values [H] -> [B * K, G, 1], in the layout of grouped queries [B * K, G, D]."""
    num_lists, group, _ = grouped.shape
    return values.view(-1, group, 1).repeat(num_lists * group // len(values), 1, 1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in float32 of scores [..., S], with sinks [..., 1] in the denominator."""
    if sinks is None:
        return scores.softmax(-1, torch.float32)
    return torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1).softmax(-1, torch.float32)[
        ..., :-1
    ]


@op("attention.plan:plan_prefill_attention")
def plan_prefill_attention(
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    cache: KVCache,
    *,
    num_heads: int,
    max_q_len: int,
    window: int | None = None,
    invariant: bool = False,
) -> PrefillPlan:
    """Return the plan of one step for all layers with a cache of this shape, this window, and `num_heads` query heads.

    block_tables [B, N] integers; q_offsets [B + 1] integers: row b owns queries q_offsets[b] to q_offsets[b + 1], at
    most max_q_len of them; kv_lens [B] integers: query i of the row is at position kv_lens[b] - (number of its queries)
    + i.

    `invariant` fixes the tiles, which otherwise depend on max_q_len. A query then gets the same bits whatever else is
    in the batch, however its prompt is cut into chunks, and also as a row of one query, as in decode. Raises ValueError
    like `plan_decode_attention`.
    """
    tile = 1 if invariant else QUERY_TILE
    return _PrefillRows(block_tables, q_offsets.tolist(), kv_lens.tolist(), window, tile)


@op("attention.prefill:paged_prefill_attention")
def paged_prefill_attention(
    q: Tensor,
    cache: KVCache,
    plan: PrefillPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of each row, causally, to the row's whole context.

    q [T, H, D] -> [T, H, D] in q's dtype; tokens outside the plan's rows are neither read nor written. sinks and alibi
    [H] float32. The result is written to `out` if given.
    """
    rows = _PrefillRows(*plan)
    shape = _Shape(scale, softcap, sinks, alibi)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for row, kv_len in enumerate(rows.kv_lens):
        start, end = rows.offsets[row], rows.offsets[row + 1]
        if kv_len == 0:
            output[start:end].zero_()
            continue
        for first in range(start, end, rows.tile):
            last = min(first + rows.tile, end)
            output[first:last] = _attend_row(
                q[first:last],
                cache,
                rows.block_tables[row],
                kv_len - (end - last),
                last - first,
                rows.window,
                shape,
            )
    return output


def paged_joint_attention(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    *,
    kv_len: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of one row to the row's context and to each other, regardless of order.

    q [T, H, D], of tokens at positions kv_len - T to kv_len - 1; block_table [N] integers -> [T, H, D]. `window`, sinks
    and alibi as in prefill: the window bounds the context before a token. In plain torch, for the images of a prompt.
    """
    shape = _Shape(scale, softcap, sinks, alibi)
    return _attend_row(q, cache, block_table, kv_len, len(q), window, shape, joint=True)


def _attend_row(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    kv_len: int,
    q_len: int,
    window: int | None,
    shape: _Shape,
    *,
    joint: bool = False,
) -> Tensor:
    """Attend with queries q [q_len, H, D] at positions kv_len - q_len to kv_len - 1 of one row, whose blocks are [N].
    `joint`: the queries attend to each other."""
    num_kv_heads, block_size = cache.k.shape[1:3]
    lowest = 0 if window is None else max(0, kv_len - q_len - window + 1)
    first_page = lowest // block_size
    skipped = first_page * block_size
    pages = block_table[first_page : -(-kv_len // block_size)].long()
    lines = (pages * num_kv_heads + torch.arange(num_kv_heads, device=q.device)[:, None]).view(-1)
    k, v = (
        part.view(num_kv_heads, -1, part.shape[-1])[:, lowest - skipped : kv_len - skipped]
        for part in cache.read_pages(lines, q.dtype)
    )
    return _attend_keys(q, k, v, kv_len - q_len - lowest, window, shape, joint=joint)


def _attend_keys(
    q: Tensor, k: Tensor, v: Tensor, first: int, window: int | None, shape: _Shape, *, joint: bool
) -> Tensor:
    """q [T, H, D] at positions first, first + 1, ... against k and v [K, S, D] at positions 0, 1, ... -> [T, H, D]."""
    tokens, num_heads, _ = q.shape
    num_kv_heads, length, _ = k.shape
    group = num_heads // num_kv_heads
    scale, softcap, sinks, alibi = shape
    plain = softcap is None and sinks is None and alibi is None
    causal = plain and first == 0 and window is None and not joint
    visible = None
    if not causal:
        distance = torch.arange(first, first + tokens, device=q.device)[:, None] - torch.arange(length, device=q.device)
        visible = (distance >= 0) | joint
        visible = visible if window is None else visible & (distance < window)
    if plain or visible is None:
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=visible,
            is_causal=causal,
            scale=scale,
            enable_gqa=group > 1,
        )
        return attended[0].transpose(0, 1)
    grouped = q.view(tokens, num_kv_heads, group, -1).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, k[:, None].transpose(-1, -2))
    scores = scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if alibi is not None:
        scores = scores - alibi.view(num_kv_heads, group, 1, 1) * distance
    scores = scores.masked_fill_(~visible, float("-inf"))
    weights = _softmax(scores, None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)).to(v.dtype)
    return torch.matmul(weights, v[:, None]).permute(2, 0, 1, 3).reshape(q.shape)
