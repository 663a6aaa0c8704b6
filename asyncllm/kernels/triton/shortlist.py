"""Sampling across ranks: the bits of `kernels.shortlist`, built from the parts of the sampling kernels.

A rank's share of a row is searched like a whole row (`kernels.triton.sampling`), in groups of 64 neighbouring tokens.
Lists are in token order. The draw is one program per row, which sorts the entries of all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.shortlist import EMPTY, LENGTH, TokenRange
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.sampling import (
    _BEST,
    _DRAWN_GROUPS,
    _ID_MASK,
    _LOWEST,
    _NOT_FINITE,
    _NOTHING_LEFT,
    _NUM_SETTINGS,
    _QUADS,
    _STATE,
    _TICKET,
    DRAW_WARPS,
    _bound,
    _choose_groups,
    _dense_best,
    _first_of,
    _gumbel,
    _last_key,
    _mass,
    _noise_words,
    _nucleus_limit,
    _pack,
    _tally,
    _tile,
    _value,
    draw_splits,
    find_maxima,
    sizes_of,
)

__all__ = ["draw_listed", "row_maxima", "shortlist"]

_EMPTY, _LENGTH = tl.constexpr(EMPTY), tl.constexpr(LENGTH)


@triton.jit
def row_maxima_kernel(groups, maxima, NUM_GROUPS: tl.constexpr, SHIFT: tl.constexpr, USE_PDL: tl.constexpr):
    """Program r: the maximum of row r as float32, from the keys of its groups."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    top = tl.max(tl.load(groups + row * NUM_GROUPS + tl.arange(0, NUM_GROUPS)))
    tl.store(maxima + row, _value(top, SHIFT))


@triton.jit
def _entry(x, token):
    """Return float32 logits and ids packed like `sampling.pack`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(tl.int64) << 32) | (token.to(tl.int64) ^ _ID_MASK)


@triton.jit
def _list_of_one(row_list, entry):
    places = tl.arange(0, _LENGTH)
    tl.store(row_list + places, tl.where(places == 0, entry, _EMPTY))


@triton.jit
def _list_most_likely(
    row_list,
    logits_row,
    keys,
    chosen,
    own_top,
    top_k,
    first_token,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """List the `top_k` most likely of the rank's tokens, or all if there are fewer."""
    floor = tl.full((), -0x7F800001 >> SHIFT, tl.int32)
    zero = tl.zeros((), tl.float32)
    bound = _bound(keys, top_k, floor, own_top)
    num_chosen = _choose_groups(keys, chosen, bound, VOCAB, NUM_GROUPS)
    last = _last_key(logits_row, chosen, num_chosen, top_k, bound, own_top, zero, zero, False, VOCAB, SHIFT)
    ties = top_k - _tally(logits_row, chosen, num_chosen, last + 1, zero, zero, False, VOCAB, SHIFT)
    seen = tl.zeros((), tl.int64)
    length = tl.zeros((), tl.int32)
    for first in range(0, num_chosen, _DRAWN_GROUPS):
        tokens, x, found, valid = _tile(logits_row, chosen, first, num_chosen, _DRAWN_GROUPS, VOCAB, SHIFT)
        tied = (valid & (found == last)).to(tl.int32)
        of_groups = tl.sum(tied, axis=1)
        rank = seen + ((tl.cumsum(of_groups, 0) - of_groups)[:, None] + tl.cumsum(tied, 1)).to(tl.int64)
        kept = ((valid & (found > last)) | ((tied > 0) & (rank <= ties))).to(tl.int32)
        seen += tl.sum(of_groups).to(tl.int64)
        of_groups = tl.sum(kept, axis=1)
        places = length + (tl.cumsum(of_groups, 0) - of_groups)[:, None] + tl.cumsum(kept, 1) - 1
        tl.store(row_list + places, _entry(x, first_token + tokens), mask=kept > 0)
        length += tl.sum(of_groups)
    places = tl.arange(0, _LENGTH)
    tl.store(row_list + places, tl.full((_LENGTH,), _EMPTY, tl.int64), mask=places >= length)


@triton.jit(
    do_not_specialize=["first_token", "vocab_size"],
    do_not_specialize_on_alignment=["slots", "positions", "maxima", "settings"],
)
def shortlist_kernel(
    logits,
    settings,
    slots,
    positions,
    maxima,
    groups,
    state,
    chosen,
    lists,
    first_token,
    vocab_size,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (r, s) of (R, S): part s of the work on row r, or all of it if it cannot be shared and s is 0."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    slot = tl.load(slots + row).to(tl.int64)
    own = settings + tl.maximum(slot, 0) * _NUM_SETTINGS
    top_k = tl.load(own + 1)
    reciprocal = tl.load(own + 4).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_value = tl.load(maxima + row)
    infinity = float("inf")
    usable = (top_value < infinity) & (top_value > -infinity) & (slot >= 0)
    keys = tl.load(groups + row * NUM_GROUPS + tl.arange(0, NUM_GROUPS))
    own_top = tl.max(keys)
    logits_row = logits + row * STRIDE
    row_list = lists + row * _LENGTH
    if (own_top <= (-0x7F800001 >> SHIFT)) | (usable == 0):
        # The rank has no token, or no possible one, or there is nothing to draw.
        if part == 0:
            _list_of_one(row_list, _EMPTY)
    elif reciprocal == 0:
        if part == 0:
            token = _first_of(logits_row, keys, own_top, VOCAB, NUM_GROUPS, SHIFT)
            _list_of_one(row_list, _entry(_value(own_top, SHIFT), first_token + token))
    elif top_k > 0:
        if part == 0:
            _list_most_likely(
                row_list,
                logits_row,
                keys,
                chosen + row * NUM_GROUPS,
                own_top,
                top_k,
                first_token,
                VOCAB,
                NUM_GROUPS,
                SHIFT,
            )
    else:
        seed = tl.load(own)
        least = tl.load(own + 3)
        position = tl.load(positions + row).to(tl.int64)
        state_row = state + row * _STATE
        quads_per_part = tl.cdiv(tl.cdiv(VOCAB, 4 * _QUADS), tl.num_programs(1)) * _QUADS
        begin = part * quads_per_part
        end = tl.minimum(begin + quads_per_part, tl.cdiv(VOCAB, 4))
        best = _dense_best(
            logits_row, seed, position, top_value, reciprocal, least, begin, end, first_token // 4, VOCAB
        )
        tl.atomic_max(state_row + _BEST, best, sem="acq_rel")
        if tl.atomic_add(state_row + _TICKET, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            best = tl.atomic_max(state_row + _BEST, _LOWEST, sem="acq_rel")
            token = (best & _ID_MASK) ^ _ID_MASK
            x = tl.load(logits_row + token).to(tl.float32)
            # Tokens excluded by min-p or by the bound of their noise have a score of minus infinity.
            _list_of_one(row_list, tl.where((best >> 32) > -0x7F800001, _entry(x, first_token + token), _EMPTY))


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size"],
    do_not_specialize_on_alignment=["slots", "positions", "tokens", "flags", "maxima", "settings"],
)
def draw_listed_kernel(
    lists,
    settings,
    slots,
    positions,
    maxima,
    tokens,
    flags,
    num_rows,
    vocab_size,
    RANKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program r: the draw of row r from the lists [RANKS, R, LENGTH]. ENTRIES: entries of all lists, rounded up to a
    power of two."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    slot = tl.load(slots + row).to(tl.int64)
    own = settings + tl.maximum(slot, 0) * _NUM_SETTINGS
    seed = tl.load(own)
    top_k = tl.load(own + 1)
    top_p = tl.load(own + 2).to(tl.float64, bitcast=True)
    least = tl.load(own + 3)
    reciprocal = tl.load(own + 4).to(tl.int32).to(tl.float32, bitcast=True)
    position = tl.load(positions + row).to(tl.int64)
    bounded = (top_k > 0) & (top_k < vocab_size)
    top_value = tl.load(maxima + row)
    infinity = float("inf")
    flag = tl.where(top_value < infinity, 0, _NOT_FINITE)
    flag = tl.where(top_value == -infinity, _NOTHING_LEFT, flag)
    flag = tl.where(slot < 0, 0, flag)
    idle = (flag != 0) | (slot < 0)
    places = tl.arange(0, ENTRIES)
    addresses = lists + ((places // _LENGTH) * num_rows + row) * _LENGTH + places % _LENGTH
    entries = tl.load(addresses, mask=places < RANKS * _LENGTH, other=_EMPTY)
    if idle | (reciprocal == 0):
        token = (tl.max(entries) & _ID_MASK) ^ _ID_MASK
        tl.store(tokens + row, tl.where(idle, 0, token))
    else:
        entries = tl.sort(entries, descending=True)
        kept = entries != _EMPTY
        ids = (entries & _ID_MASK) ^ _ID_MASK
        x = tl.where(kept, _value((entries >> 32).to(tl.int32), 0), top_value)
        shifted = (x - top_value) * reciprocal
        masses = _mass(shifted)
        if bounded:
            kept = kept & (places < top_k)
            masses = tl.where(kept, masses, 0)
            if top_p < 1:
                limit = _nucleus_limit(top_p, tl.sum(masses))
                kept = kept & (tl.cumsum(masses, 0) - masses < limit)
        if least > 0:
            kept = kept & (masses >= least)
        w0, w1, w2, w3 = _noise_words(seed, position, (ids >> 2).to(tl.int32))
        place = ids & 3
        words = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
        best = tl.max(_pack(tl.where(kept, _gumbel(words) + shifted, -float("inf")), ids))
        tl.store(tokens + row, (best & _ID_MASK) ^ _ID_MASK)
    tl.store(flags + row, flag)


def row_maxima(logits: Tensor, tokens: TokenRange) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `kernels.shortlist.row_maxima`. Rows are contiguous."""
    maxima = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if not len(logits):
        return maxima, ()
    groups, state = find_maxima(logits, tokens.number)
    sizes = sizes_of(logits, tokens.number)
    launch(
        row_maxima_kernel,
        (len(logits), 1, 1),
        (groups, maxima),
        NUM_GROUPS=sizes["NUM_GROUPS"],
        SHIFT=sizes["SHIFT"],
    )
    return maxima, (groups, state)


def shortlist(
    logits: Tensor,
    tokens: TokenRange,
    known: tuple[Tensor, ...],
    maxima: Tensor,
    settings: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See `kernels.shortlist.shortlist`. Rows are contiguous."""
    num_rows = len(logits)
    lists = torch.empty((num_rows, LENGTH), dtype=torch.int64, device=logits.device)
    if num_rows:
        groups, state = known
        launch(
            shortlist_kernel,
            (num_rows, draw_splits(num_rows, max(tokens.number, 1)), 1),
            (logits, settings, slots, positions, maxima, groups, state, torch.empty_like(groups), lists),
            (tokens.first, tokens.vocab_size),
            num_warps=DRAW_WARPS,
            fp_fusion=False,
            **sizes_of(logits, tokens.number),
        )
    return lists


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
    """See `kernels.shortlist.draw_listed`. `lists` are contiguous."""
    ranks, num_rows, _ = lists.shape
    if num_rows:
        launch(
            draw_listed_kernel,
            (num_rows, 1, 1),
            (lists, settings, slots, positions, maxima, tokens, flags),
            (num_rows, vocab_size),
            fp_fusion=False,
            RANKS=ranks,
            ENTRIES=triton.next_power_of_2(ranks * LENGTH),
        )
