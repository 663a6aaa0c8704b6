"""States that tokens write and read: memories of keys and values (linear attention), by the gated delta rule or as
state spaces, and Mamba's features.

Memories have two forms. Token by token is the definition, and used for rows of one token. Prompts are cut into pieces,
the chunks of the papers: the effects of a piece's tokens on each other are matrix products, and the memory is read and
written once per piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op
from asyncllm.kernels.recurrent import StatePlan

__all__ = ["gated_delta_rule", "selective_scan", "state_space"]


@op("memory:gated_delta_rule")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    """A memory S of keys and values per head: S decays, forgets a fraction beta of what it holds for the token's key,
    and learns the token's value instead; then the query reads it (Yang et al., Gated Delta Networks, 2024).

    q, k [T, Hk, K], v [T, H, V], log_decay and beta [T, H] float32 -> [T, H, V]. Head h of v uses head h * Hk // H of q
    and k, whose vectors are normalised to length 1; queries are scaled by K^-0.5. `state` [blocks, H, K, V] float32.
    With log_decay [T, H, K], each feature of a key has a decay of its own (Kimi Linear, arXiv 2510.26692).
    """
    q, k = _unit(q.float()) * q.shape[2] ** -0.5, _unit(k.float())
    return _recur(q, k, v, log_decay, beta, state, plan, delta=True)


@op("memory:state_space")
def state_space(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, sizes: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    """The state of each head decays, and the outer product of k and size * v is added to it; then q reads it (Mamba-2,
    arXiv 2405.21060, where q is C, k is B and v is x).

    q, k [T, G, N], v [T, H, P], log_decay and sizes [T, H] float32 -> [T, H, P]. Head h uses group h * G // H. `state`
    [blocks, H, N, P] float32.
    """
    return _recur(q.float(), k.float(), v, log_decay, sizes, state, plan, delta=False)


@op("selective_scan:selective_scan")
def selective_scan(
    x: Tensor, sizes: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    """Mamba's scan: every feature has its own state and forgets at its own rate (arXiv 2312.00752).

    At a step of some size, a feature's state decays by exp(rate * size), the write vector times size * x is added,
    and then the read vector reads it.

    x [T, C], sizes [T, C] float32, rates [C, N] float32, below 0; writes, reads [T, N] -> [T, C]. `state` [blocks, N,
    C] float32.
    """
    out = x.new_empty(x.shape)
    begin, end = plan.q_offsets[:-1].long(), plan.q_offsets[1:].long()
    held = torch.where((plan.sources >= 0)[:, None, None], state[plan.sources.clamp(min=0)], 0)
    rates, wide = rates.t(), x.float()
    for step in range(int((end - begin).max())):
        rows = torch.nonzero(end - begin > step)[:, 0]
        token = begin[rows] + step
        size = sizes[token][:, None]
        memory = held[rows] * (size * rates).exp() + writes[token].float()[..., None] * (size * wide[token][:, None])
        out[token] = (memory * reads[token].float()[..., None]).sum(1).to(x.dtype)
        held[rows] = memory
        written = plan.targets[token] >= 0
        state[plan.targets[token][written]] = memory[written]
    return out


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
    """`delta`: subtract from the value what the memory already holds for the key."""
    heads = v.shape[1] // k.shape[1]
    decay = log_decay if log_decay.ndim == 3 else log_decay[..., None]
    tokens = _Tokens(q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1), v.float(), decay, weights)
    out = v.new_empty(v.shape)
    memory = torch.where((plan.sources >= 0)[:, None, None, None], state[plan.sources.clamp(min=0)], 0)
    _by_token(tokens, memory, state, plan, out, delta=delta)
    _by_piece(tokens, memory, state, plan, out, delta=delta)
    return out


class _Tokens(NamedTuple):
    q: Tensor
    """[T, H, K], like k."""
    k: Tensor
    v: Tensor
    """[T, H, V] float32."""
    log_decay: Tensor
    """[T, H, K], or [T, H, 1] for all features of a key."""
    weights: Tensor
    """[T, H]."""


def _by_token(tokens: _Tokens, memory: Tensor, state: Tensor, plan: StatePlan, out: Tensor, *, delta: bool) -> None:
    """Compute the first rows of the plan, all at once. memory [B, H, K, V]."""
    q, k, v, log_decay, weights = tokens
    begin, end = plan.q_offsets[: plan.num_serial].long(), plan.q_offsets[1 : plan.num_serial + 1].long()
    for step in range(int((end - begin).max()) if plan.num_serial else 0):
        rows = torch.nonzero(end - begin > step)[:, 0]
        token = begin[rows] + step
        held = memory[rows] * log_decay[token].exp()[..., None]
        learned = v[token]
        if delta:
            learned = learned - (held * k[token][..., None]).sum(2)
        learned = learned * weights[token][..., None]
        held += k[token][..., None] * learned[..., None, :]
        out[token] = (held * q[token][..., None]).sum(2).to(out.dtype)
        memory[rows] = held
        written = plan.targets[token] >= 0
        state[plan.targets[token][written]] = held[written]


def _by_piece(tokens: _Tokens, memory: Tensor, state: Tensor, plan: StatePlan, out: Tensor, *, delta: bool) -> None:
    """Compute the other rows, one after the other."""
    pieces = plan.pieces
    if pieces is None:
        return
    q, k, v, log_decay = (each.transpose(0, 1) for each in tokens[:4])
    weights = tokens.weights.t()[..., None]
    spans, offsets = pieces.spans.tolist(), pieces.offsets.tolist()
    for row, held in enumerate(memory[plan.num_serial :]):
        for start, stop in spans[offsets[row] : offsets[row + 1]]:
            queries, keys, learned, weight = (each[:, start:stop] for each in (q, k, v, weights))
            # The fraction that remains, at each token, of the memory before the piece.
            decay = log_decay[:, start:stop].cumsum(1)
            left = decay.exp()
            if delta:
                # Each token forgets what the memory, and the earlier tokens of the piece, hold for its key.
                predicted = (_scores(keys, keys, decay) * weight).tril(-1)
                learned = torch.linalg.solve_triangular(
                    predicted, weight * (learned - (left * keys) @ held), upper=False, unitriangular=True
                )
            else:
                learned = weight * learned
            read = (left * queries) @ held + _scores(queries, keys, decay) @ learned
            out[start:stop] = read.transpose(0, 1).to(out.dtype)
            held = left[:, -1, :, None] * held + (keys * (decay[:, -1:] - decay).exp()).mT @ learned
            target = int(plan.targets[stop - 1])
            if target >= 0:
                state[target] = held


def _scores(reads: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    """Return the products [H, t, t] of each token's vector with the keys up to its own, of which a fraction remains at
    that token. reads, keys [H, t, K], decay [H, t, K or 1]: sums of logarithms from the piece's first token on."""
    left_of = (decay[:, :, None] - decay[:, None]).clamp(max=0).exp()
    if decay.shape[2] == 1:
        return (reads @ keys.mT * left_of[..., 0]).tril()
    return torch.einsum("hik,hjk,hijk->hij", reads, keys, left_of).tril()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
