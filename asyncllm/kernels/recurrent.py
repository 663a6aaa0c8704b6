"""Layers whose tokens know of those before them by a state: a short convolution, the gated delta rule, state spaces.

The state lies in the blocks of the cache. A block has the state after the latest token in it, and so, once it is full,
the state at its border: what goes on behind a block needs no more than that block.

Memories of keys and values have two forms. By token is how they are defined, and what a row of one token takes. Prompts
are cut into pieces: what the tokens of a piece do to each other is products of matrices, and the memory is read and
written once a piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["Pieces", "StatePlan", "States", "gated_delta_rule", "plan_states", "short_convolution", "state_space"]


class States(NamedTuple):
    """What a layer carries from token to token: tensors [blocks, *shape]."""

    tensors: tuple[Tensor, ...]
    block_size: int
    """Tokens of a block."""


MOST_TOKENS = 64
"""Of a piece. What its tokens do to each other grows with their number, the number of pieces falls."""


class Pieces(NamedTuple):
    """The tokens of R rows, cut where a block ends, and within a block every `size` tokens."""

    spans: Tensor
    """[P, 2] int32: each piece's first token, and the one behind its last; in the rows' order. There is room for more
    than there are, and what is left over holds no token."""
    offsets: Tensor
    """[R + 1] int32: row r owns spans offsets[r] to offsets[r + 1]."""
    size: int
    """Most tokens of a piece; it divides a block."""


class StatePlan(NamedTuple):
    """Which states the T tokens of B rows begin with, and which they leave."""

    rows: Tensor
    """[T] int64: the row of each token."""
    q_offsets: Tensor
    """[B + 1] int32: row b owns tokens q_offsets[b] to q_offsets[b + 1]."""
    sources: Tensor
    """[B] int64: the block of the token before the row's first one; -1: there is none, and the state is 0."""
    targets: Tensor
    """[T] int64: the block that keeps the state after this token; -1: none does. These are the last tokens of rows and
    of blocks."""
    num_serial: int
    """How many rows, the first ones, are taken token by token."""
    pieces: Pieces | None
    """Of the other rows; None: there are none."""


def plan_states(
    places: Tensor, q_offsets: Tensor, kv_lens: Tensor, block_tables: Tensor, block_size: int, *, num_serial: int
) -> StatePlan:
    """Plan a step, of whose inputs these are; nothing waits for the device. Rows of padding have no source, and their
    tokens no target. The first `num_serial` rows are taken token by token."""
    num_tokens = places.shape[0]
    ends = q_offsets[1:]
    tokens = torch.arange(num_tokens, dtype=q_offsets.dtype, device=q_offsets.device)
    rows = torch.searchsorted(ends, tokens, right=True)
    before = kv_lens.long() - torch.diff(q_offsets) - 1
    known = block_tables.gather(1, before.clamp(min=0).div_(block_size, rounding_mode="floor")[:, None])[:, 0]
    at_border = (places + 1).remainder(block_size) == 0
    is_last = tokens + 1 == ends.gather(0, rows.clamp(max=len(ends) - 1))
    blocks = places.div(block_size, rounding_mode="floor")
    return StatePlan(
        rows,
        q_offsets,
        torch.where(before >= 0, known.long(), -1),
        torch.where((at_border | is_last) & (places >= 0), blocks, -1),
        num_serial,
        _cut(q_offsets[num_serial:], before[num_serial:] + 1, num_tokens, block_size),
    )


def _cut(q_offsets: Tensor, before: Tensor, num_tokens: int, block_size: int) -> Pieces | None:
    """`before`: how many tokens are before each row's."""
    num_rows = len(before)
    if not num_rows or not num_tokens:
        return None
    size = max(size for size in range(1, min(MOST_TOKENS, block_size) + 1) if block_size % size == 0)
    begin, end = q_offsets[:-1], q_offsets[1:]
    begun = before.to(q_offsets.dtype).clamp(min=0) % size
    counts = torch.where(end > begin, (begun + end - begin + size - 1) // size, 0)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=q_offsets.dtype), (1, 0))
    # A row of n tokens has at most n // size pieces of `size` tokens, and two others.
    pieces = torch.arange(
        min(num_tokens, num_tokens // size + 2 * num_rows), dtype=q_offsets.dtype, device=q_offsets.device
    )
    rows = torch.searchsorted(offsets[1:], pieces, right=True).clamp_(max=num_rows - 1)
    starts = begin[rows] - begun[rows] + (pieces - offsets[rows]) * size
    spans = torch.stack([torch.maximum(starts, begin[rows]), torch.minimum(starts + size, end[rows])], 1)
    return Pieces(spans, offsets, size)


@op("recurrent:short_convolution")
def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, plan: StatePlan, *, silu: bool
) -> Tensor:
    """The convolution of each of C features over its latest K tokens, and silu of it if asked for.

    x [T, C], weight [C, K], bias [C] -> [T, C], computed in float32 and rounded once. `state` [blocks, K - 1, C] has
    the inputs before a row's first token, the latest last, and gets those up to the targets.
    """
    size = weight.shape[1]
    begin = plan.q_offsets[:-1].long()[plan.rows]
    known = torch.where((plan.sources >= 0)[:, None, None], state[plan.sources.clamp(min=0)], 0)
    # The window of token t: those of its row up to itself, behind what the state has of the tokens before them.
    window = x.new_empty(len(x), size, x.shape[1])
    for back in range(size):
        index = torch.arange(len(x)) - back
        lacking = begin - index
        of_state = known[plan.rows, (size - 1 - lacking).clamp(0, size - 2)]
        window[:, size - 1 - back] = torch.where((lacking > 0)[:, None], of_state, x[index.clamp(min=0)])
    written = plan.targets >= 0
    state[plan.targets[written]] = window[written, 1:]
    y = torch.einsum("tkc,ck->tc", window.float(), weight.float())
    if bias is not None:
        y += bias.float()
    return (torch.nn.functional.silu(y) if silu else y).to(x.dtype)


@op("recurrent:gated_delta_rule")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    """A memory S of keys and values by head: S decays, forgets what it says of the token's key by beta, and learns the
    token's value in its place; then the query reads it (Yang et al., Gated Delta Networks, 2024).

    q, k [T, Hk, K] of any length, v [T, H, V], log_decay and beta [T, H] float32 -> [T, H, V]. Heads h of v go with
    head h * Hk // H of q and k, whose vectors are divided by their lengths; queries are scaled by K^-0.5. `state`
    [blocks, H, K, V] float32.
    """
    q, k = _unit(q.float()) * q.shape[2] ** -0.5, _unit(k.float())
    return _recur(q, k, v, log_decay, beta, state, plan, delta=True)


@op("recurrent:state_space")
def state_space(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, sizes: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    """The state of each head decays, and is written to by the outer product of k and a step of this size along v; then
    q reads it (Mamba-2, arXiv 2405.21060, where q is C, k is B and v is x).

    q, k [T, G, N], v [T, H, P], log_decay and sizes [T, H] float32 -> [T, H, P]. Heads h go with group h * G // H.
    `state` [blocks, H, N, P] float32.
    """
    return _recur(q.float(), k.float(), v, log_decay, sizes, state, plan, delta=False)


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weights: Tensor,
    state: Tensor,
    plan: StatePlan,
    *,
    delta: bool,
) -> Tensor:
    """`delta`: what the memory says of the key already is taken from the value."""
    heads = v.shape[1] // k.shape[1]
    q, k, wide = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1), v.float()
    out = v.new_empty(v.shape)
    memory = torch.where((plan.sources >= 0)[:, None, None, None], state[plan.sources.clamp(min=0)], 0)
    _by_token(q, k, wide, log_decay, weights, state, plan, memory, out, delta=delta)
    if plan.pieces is not None:
        _by_piece(q, k, wide, log_decay, weights, state, plan, plan.pieces, memory, out, delta=delta)
    return out


def _by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weights: Tensor,
    state: Tensor,
    plan: StatePlan,
    memory: Tensor,
    out: Tensor,
    *,
    delta: bool,
) -> None:
    """The first rows of the plan, all at once. memory [B, H, K, V]."""
    begin, end = plan.q_offsets[: plan.num_serial].long(), plan.q_offsets[1 : plan.num_serial + 1].long()
    for step in range(int((end - begin).max()) if plan.num_serial else 0):
        rows = torch.nonzero(end - begin > step)[:, 0]
        token = begin[rows] + step
        held = memory[rows] * log_decay[token].exp()[..., None, None]
        learned = v[token]
        if delta:
            learned = learned - torch.einsum("bhkv,bhk->bhv", held, k[token])
        learned = learned * weights[token][..., None]
        held += k[token][..., None] * learned[..., None, :]
        out[token] = torch.einsum("bhkv,bhk->bhv", held, q[token]).to(out.dtype)
        memory[rows] = held
        written = plan.targets[token] >= 0
        state[plan.targets[token][written]] = held[written]


def _by_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weights: Tensor,
    state: Tensor,
    plan: StatePlan,
    pieces: Pieces,
    memory: Tensor,
    out: Tensor,
    *,
    delta: bool,
) -> None:
    """The other rows, one after the other."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    log_decay, weights = log_decay.t(), weights.t()[..., None]
    spans, offsets = pieces.spans.tolist(), pieces.offsets.tolist()
    for row, held in enumerate(memory[plan.num_serial :]):
        for start, stop in spans[offsets[row] : offsets[row + 1]]:
            queries, keys, learned, weight = (each[:, start:stop] for each in (q, k, v, weights))
            # What is left, at each token, of what was there before the piece, and of what each token wrote.
            decay = log_decay[:, start:stop].cumsum(1)
            left = decay.exp()[..., None]
            left_of = (decay[:, :, None] - decay[:, None]).tril().exp()
            if delta:
                # Each token forgets what the memory and the tokens before it in the piece say of its key.
                said = (keys @ keys.mT * left_of * weight).tril(-1)
                learned = torch.linalg.solve_triangular(
                    said, weight * (learned - left * (keys @ held)), upper=False, unitriangular=True
                )
            else:
                learned = weight * learned
            read = left * (queries @ held) + (queries @ keys.mT * left_of).tril() @ learned
            out[start:stop] = read.transpose(0, 1).to(out.dtype)
            held = left[:, -1:] * held + (keys * left_of[:, -1, :, None]).mT @ learned
            target = int(plan.targets[stop - 1])
            if target >= 0:
                state[target] = held


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
