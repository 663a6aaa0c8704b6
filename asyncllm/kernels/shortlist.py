"""Sampling when each rank has the logits of some tokens: each rank lists the tokens that can win, and the lists
suffice.

    row_maxima      a rank's largest logits               then the largest over all ranks
    shortlist       its tokens that may be drawn          then the lists of all ranks
    draw_listed     the draw, identical to `sampling.sample` of the whole rows, bit for bit

A list holds the most likely token of a greedy row; the `top_k` most likely ones of a row with top-k; and for a row with
neither top-k nor top-p, the token that wins among the rank's, if it can win at all. Rows with top-p but without top-k
have no bounded list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels import sampling
from asyncllm.kernels.dispatch import op

__all__ = ["EMPTY", "LENGTH", "TokenRange", "draw_listed", "row_maxima", "shortlist"]

LENGTH = 64
"""Length of a list, and the largest top-k whose rows can be drawn from lists."""

EMPTY = -(2**63)
"""An entry without a token."""


class TokenRange(NamedTuple):
    """The tokens of a vocabulary that the columns of logits stand for; further columns are meaningless."""

    first: int
    """A multiple of 4."""
    number: int
    vocab_size: int


@op("shortlist:row_maxima")
def row_maxima(logits: Tensor, tokens: TokenRange) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the largest logit of each row of `logits` [R, v] as float32 [R] (NaN if the row has one, -inf without
    tokens), and intermediate results for `shortlist`."""
    if not tokens.number:
        return torch.full((len(logits),), -torch.inf, device=logits.device), ()
    return logits[:, : tokens.number].amax(dim=-1).float(), ()


@op("shortlist:shortlist")
def shortlist(
    logits: Tensor,
    tokens: TokenRange,
    known: tuple[Tensor, ...],
    maxima: Tensor,
    settings: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return the tokens of `logits` [R, v] that may be drawn: [R, LENGTH] int64, in the format of `sampling.pack`, in
    any order.

    `known`: the second result of `row_maxima`. `maxima` [R] float32: the maxima of the whole rows. The rest is as in
    `sampling.sample`. Each row is greedy, or has a top-k of at most LENGTH or of the whole vocabulary, or neither top-k
    nor top-p. For rows from which nothing can be drawn, the list is meaningless.
    """
    lists = torch.full((len(logits), LENGTH), EMPTY, device=logits.device)
    if not tokens.number or not len(logits):
        return lists
    logits = logits[:, : tokens.number].float()
    settings = settings[slots.clamp_min(0)]
    seeds, top_k, _, min_masses, reciprocal = settings.unbind(-1)
    reciprocal = reciprocal.to(torch.int32).view(torch.float32)
    bounded = (top_k > 0) & (top_k < tokens.vocab_size)
    lengths = torch.where((reciprocal > 0) & bounded, top_k, 1)
    packed = sampling.pack(logits, tokens.first + torch.arange(tokens.number, device=logits.device))
    best = packed.topk(min(LENGTH, tokens.number), dim=-1).values
    places = torch.arange(best.shape[-1], device=logits.device)
    lists[:, : best.shape[-1]] = best.masked_fill(places >= lengths.unsqueeze(-1), EMPTY)
    dense = (reciprocal > 0) & ~bounded & maxima.isfinite() & (slots >= 0)
    if dense.any():
        rows = dense.nonzero().squeeze(-1)
        shifted = sampling.shift(logits[rows], maxima[rows], reciprocal[rows])
        words = sampling.all_words(seeds[rows], positions[rows].to(torch.int64), tokens.number, first=tokens.first)
        shifted = sampling.apply_min_p(shifted, None, min_masses[rows])
        won = sampling.draw_all(shifted, words).unsqueeze(-1)
        lists[rows, 0] = packed[rows].gather(-1, won).masked_fill(shifted.gather(-1, won).isneginf(), EMPTY).squeeze(-1)
    return lists


@op("shortlist:draw_listed")
def draw_listed(
    lists: Tensor,
    vocab_size: int,
    maxima: Tensor,
    settings: Tensor,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    flags: Tensor,
) -> None:
    """Draw from the `lists` [ranks, R, LENGTH] of all ranks as `sampling.sample` draws from whole rows, whose maxima
    are `maxima` [R] float32. Writes `tokens` and `flags` like it."""
    flags.copy_(torch.where(maxima < torch.inf, maxima.isneginf() * sampling.NOTHING_LEFT, sampling.NOT_FINITE))
    flags.masked_fill_(slots < 0, 0)
    usable = maxima.isfinite() & (slots >= 0)
    entries = lists.transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values
    logits, ids = sampling.unpack(entries)
    tokens.copy_(ids[:, 0].masked_fill(~usable, 0))
    seeds, top_k, top_p, min_masses, reciprocal = settings[slots.clamp_min(0)].unbind(-1)
    reciprocal = reciprocal.to(torch.int32).view(torch.float32)
    rows = (usable & (reciprocal > 0)).nonzero().squeeze(-1)
    if len(rows):
        shifted = sampling.shift(logits[rows], maxima[rows], reciprocal[rows])
        shifted = shifted.masked_fill(entries[rows] == EMPTY, -torch.inf)
        bounded = (top_k > 0) & (top_k < vocab_size)
        tokens[rows] = sampling.draw_sorted(
            shifted,
            ids[rows],
            torch.where(bounded, top_k, vocab_size)[rows],
            torch.where(bounded, top_p.contiguous().view(torch.float64), 1.0)[rows],
            min_masses[rows],
            seeds[rows],
            positions[rows].to(torch.int64),
        )
