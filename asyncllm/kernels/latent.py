"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a cache of one vector per token.

A token's *line* is its normed latent of C numbers, followed by R numbers of rotated key, which all heads share. A
head's key is its own linear map of the latent, joined with the rotated part; its value is another linear map of the
latent. Attention here is in absorbed form: the queries went through the transposed key map, [H, C], and the results are
sums of latents, [H, C], that go through the value map afterwards. A line is thus both key and value for all heads, and
is read once.

The terms row, plan, padding and absent row mean the same as in `kernels.attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.attention import DECODE_TILE, QUERY_TILE, DecodePlan, PrefillPlan
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.rotary import Rotation, apply_rotary

__all__ = [
    "LatentKV",
    "latent_decode_attention",
    "latent_prefill_attention",
    "plan_latent_decode",
    "plan_latent_prefill",
    "rope_fill_latent",
]


class LatentKV(NamedTuple):
    """The lines of one layer, in blocks."""

    pages: Tensor
    """[blocks, block_size, C + R], contiguous."""
    rank: int
    """C."""

    @property
    def lines(self) -> Tensor:
        """[blocks * block_size, C + R], by place."""
        return self.pages.view(-1, self.pages.shape[-1])


class _DecodeLines(NamedTuple):
    """Where decode attention reads its lines."""

    places: Tensor
    """[B, width] int64."""
    bias: Tensor | None
    """[B, 1, width] float32: -inf beyond a row's end; None if no row is shorter."""
    padding: Tensor | None
    """[B] bool: rows without keys; None if there are none."""


class _PrefillRows(NamedTuple):
    block_tables: Tensor
    offsets: list[int]
    """[B + 1]: row b owns queries offsets[b] to offsets[b + 1]."""
    kv_lens: list[int]
    tile: int
    """Maximum number of queries scored at a time."""


@op("latent.fill:rope_fill_latent")
def rope_fill_latent(
    q: Tensor,
    kv: Tensor,
    rotation: Rotation,
    cache: LatentKV,
    places: Tensor,
    *,
    norm: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Write the tokens' lines to the cache, and rotate the last R features of each head of q in place.

    q [T, H, D]; kv [T, C + R] as projected: a latent, to be normed by `norm` [C] and `eps`, and the R features to
    rotate; both contiguous. places [T] int64: distinct; on CUDA -1 marks a token without a place. interleaved: which
    features form a pair, as in `apply_rotary`.
    """
    rank = cache.rank
    rope = kv.shape[-1] - rank
    q[..., -rope:] = apply_rotary(q[..., -rope:], rotation, interleaved=interleaved)
    turned = apply_rotary(kv[:, None, rank:], rotation, interleaved=interleaved)[:, 0]
    line = torch.cat([rms_norm(kv[:, :rank], norm, eps), turned], -1)
    cache.lines.index_copy_(0, places, line)


@op("latent.plan:plan_latent_decode")
def plan_latent_decode(block_tables: Tensor, kv_lens: Tensor, cache: LatentKV, *, num_heads: int) -> DecodePlan:
    """Return the plan of one step for all layers with a cache of this shape and `num_heads` query heads.

    Otherwise like `kernels.plan_decode_attention`. On a GPU, raises ValueError unless the block size is a multiple of
    16, and C up to 512 and R up to 128 are multiples of 8.
    """
    block_size = cache.pages.shape[1]
    kv_lens = kv_lens[: int((kv_lens >= 0).sum())].long()
    shortest, longest = (int(bound) for bound in kv_lens.aminmax()) if len(kv_lens) else (1, 1)
    positions = torch.arange(max(longest, 1), device=kv_lens.device).expand(len(kv_lens), -1)
    # Beyond its end a row reads its last token again: a masked NaN of another sequence would still make its sum NaN.
    read = torch.minimum(positions, (kv_lens - 1).clamp_(min=0)[:, None])
    blocks = block_tables[: len(kv_lens)].gather(1, read.div(block_size, rounding_mode="floor")).long()
    bias = None
    if shortest < longest:
        bias = torch.where(positions < kv_lens[:, None], 0.0, float("-inf"))[:, None]
    padding = kv_lens == 0 if shortest == 0 else None
    return _DecodeLines(blocks * block_size + read.remainder(block_size), bias, padding)


@op("latent.decode:latent_decode_attention")
def latent_decode_attention(
    q_latent: Tensor, q_rope: Tensor, cache: LatentKV, plan: DecodePlan, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """Attend with the last token of each row to the row's context. Returns sums of latents [T, H, C], in `out` if
    given.

    q_latent [T, H, C] and q_rope [T, H, R], with a contiguous last axis. The first tokens are those of the plan's rows
    that are not absent; tokens after them are neither read nor written.
    """
    places, bias, padding = _DecodeLines(*plan)
    rows, width = places.shape
    output = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device) if out is None else out
    tile = max(1, DECODE_TILE // (width * cache.pages.shape[-1]))
    for first in range(0, rows, tile):
        some = slice(first, min(first + tile, rows))
        lines = cache.lines.index_select(0, places[some].reshape(-1)).view(-1, width, cache.pages.shape[-1])
        query = torch.cat([q_latent[some], q_rope[some]], -1)
        scores = torch.bmm(query, lines.transpose(1, 2)).float().mul_(scale)
        if bias is not None:
            scores += bias[some]
        attended = torch.bmm(scores.softmax(-1).to(lines.dtype), lines[..., : cache.rank])
        output[some] = attended if padding is None else attended.masked_fill_(padding[some, None, None], 0.0)
    return output


@op("latent.plan:plan_latent_prefill")
def plan_latent_prefill(
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    cache: LatentKV,
    *,
    num_heads: int,
    max_q_len: int,
    invariant: bool = False,
) -> PrefillPlan:
    """Return the plan for `latent_prefill_attention`, like `kernels.plan_prefill_attention`."""
    return _PrefillRows(block_tables, q_offsets.tolist(), kv_lens.tolist(), 1 if invariant else QUERY_TILE)


@op("latent.prefill:latent_prefill_attention")
def latent_prefill_attention(
    q_latent: Tensor, q_rope: Tensor, cache: LatentKV, plan: PrefillPlan, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """Attend with the last tokens of each row, causally, to the row's whole context. Returns sums of latents [T, H, C].

    q_latent [T, H, C] and q_rope [T, H, R]; tokens outside the plan's rows are neither read nor written.
    """
    rows = _PrefillRows(*plan)
    block_size = cache.pages.shape[1]
    output = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device) if out is None else out
    for row, kv_len in enumerate(rows.kv_lens):
        start, end = rows.offsets[row], rows.offsets[row + 1]
        if kv_len == 0:
            output[start:end].zero_()
            continue
        lines = cache.pages.index_select(0, rows.block_tables[row, : -(-kv_len // block_size)].long()).flatten(0, 1)
        for first in range(start, end, rows.tile):
            last = min(first + rows.tile, end)
            query = torch.cat([q_latent[first:last], q_rope[first:last]], -1)
            output[first:last] = _attend(query, lines[: kv_len - (end - last)], cache.rank, scale)
    return output


def _attend(query: Tensor, lines: Tensor, rank: int, scale: float) -> Tensor:
    """query [T, H, C + R] at the last T positions of lines [S, C + R] -> [T, H, C]."""
    tokens, length = len(query), len(lines)
    positions = torch.arange(length - tokens, length, device=query.device)
    visible = torch.arange(length, device=query.device) <= positions[:, None]
    heads = query.shape[1]
    keys = lines.expand(heads, -1, -1)
    # torch supports keys and values of different width.
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], keys[None, ..., :rank], attn_mask=visible, scale=scale
    )
    return attended[0].transpose(0, 1)
