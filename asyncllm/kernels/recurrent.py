"""Layers whose tokens know of those before them by a state: a short convolution, the gated delta rule, state spaces.

The state lies in the blocks of the cache. A block has the state after the latest token in it, and so, once it is full,
the state at its border: what goes on behind a block needs no more than that block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["StatePlan", "States", "gated_delta_rule", "plan_states", "short_convolution", "state_space"]


class States(NamedTuple):
    """What a layer carries from token to token: tensors [blocks, *shape]."""

    tensors: tuple[Tensor, ...]
    block_size: int
    """Tokens of a block."""


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


def plan_states(places: Tensor, q_offsets: Tensor, kv_lens: Tensor, block_tables: Tensor, block_size: int) -> StatePlan:
    """Plan a step, of whose inputs these are; nothing waits for the device. Rows of padding have no source, and their
    tokens no target."""
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
    )


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
    """Token by token. `delta`: what the memory says of the key already is taken from the value."""
    heads = v.shape[1] // k.shape[1]
    q, k, wide = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1), v.float()
    out = v.new_empty(v.shape)
    begin, end = plan.q_offsets[:-1].long(), plan.q_offsets[1:].long()
    memory = torch.where((plan.sources >= 0)[:, None, None, None], state[plan.sources.clamp(min=0)], 0)
    for step in range(int((end - begin).max())):
        rows = torch.nonzero(end - begin > step)[:, 0]
        token = begin[rows] + step
        held = memory[rows] * log_decay[token].exp()[..., None, None]
        learned = wide[token]
        if delta:
            learned = learned - torch.einsum("bhkv,bhk->bhv", held, k[token])
        learned = learned * weights[token][..., None]
        held += k[token][..., None] * learned[..., None, :]
        out[token] = torch.einsum("bhkv,bhk->bhv", held, q[token]).to(v.dtype)
        memory[rows] = held
        written = plan.targets[token] >= 0
        state[plan.targets[token][written]] = held[written]
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
