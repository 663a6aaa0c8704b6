"""Draws a token per row of logits without sorting or synchronizing with the host: the bits of
`kernels.sampling.sample`.

There are two kernels. The first finds the maximum of every group of 64 neighbouring tokens. The second draws:

- Greedy rows need the groups' maxima and one group.
- Rows without top-k and top-p add noise to all tokens; several programs share a row and combine by an atomic maximum.
- Filtered rows keep a prefix of the order (value falling, id rising), so only its last value, and how many tokens of
  that value belong to it, have to be found. The k-th largest group maximum is a lower bound of the k-th largest token,
  and from then on only groups that reach the bound are read: a few thousand tokens, among whose keys (integers in the
  order of the floats) the last value is found by bisection. Top-p bisects over mass instead of count. Without top-k it
  uses the total mass, to which all programs of the row contribute, and reads more groups if the bound was too high.

Every decision depends on integers or on one rounding at a time (`enable_fp_fusion=False`), and therefore equals the
reference bit by bit; the atomics do not depend on an order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels import sampling
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["DRAW_WARPS", "draw_splits", "find_maxima", "sample", "sizes_of"]

_GROUP = tl.constexpr(64)
_TILE_GROUPS = tl.constexpr(64)
"""Number of groups read together."""
_DRAWN_GROUPS = tl.constexpr(16)
"""Number of groups drawn from together; noise takes many registers."""
_QUADS = tl.constexpr(512)
"""Number of Philox blocks, of four tokens each, per iteration of a dense row."""
_FIRST_GROUPS = tl.constexpr(64)
"""Number of groups in which a nucleus without top-k is searched first; eight times as many each time it is not
found."""

_BEST, _MASS, _TICKET, _STATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""Columns of the state shared by the programs of a row, and their number."""

_NOT_FINITE, _NOTHING_LEFT = tl.constexpr(sampling.NOT_FINITE), tl.constexpr(sampling.NOTHING_LEFT)
_NUM_SETTINGS = tl.constexpr(sampling.NUM_SETTINGS)
_LOG_2, _LOG2_E = tl.constexpr(sampling.LOG_2), tl.constexpr(sampling.LOG2_E)
_LOG_2_HIGH, _LOG_2_LOW = tl.constexpr(sampling.LOG_2_HIGH), tl.constexpr(sampling.LOG_2_LOW)
_ROUNDER = tl.constexpr(sampling.ROUNDER)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_SQRT_HALF_BITS = tl.constexpr(sampling.SQRT_HALF_BITS)
_LOG_TAIL = tl.constexpr(sampling.LOG_TAIL)
_EXP_TAIL = tl.constexpr(sampling.EXP_TAIL)
_LOWEST = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(0xFFFFFFFF)

_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits that are 0 in each float32 converted from the dtype; keys omit them, so that bisections take fewer steps."""

_MAXIMA_WARPS, _MAXIMA_PROGRAMS = 8, 2112
DRAW_WARPS, _DRAW_PROGRAMS = 8, 528
"""Warps per program, and total number of programs wanted: rows are divided until there are that many.

On an H200 with 128,256 tokens in bfloat16, the maxima of 256 rows take 20.2 us with 8 warps and 2,112 programs, and
24.4 us with 4 and 1,056. With the latter, both kernels together take, for 1, 16, 64 and 256 peaked rows: greedy 3.0,
7.4, 10.1 and 41.2 us; temperature alone 7.2, 17.2, 35.2 and 117; top-k 50 and top-p 0.95 30.7, 34.6, 52.1 and 85.1.
Draws by 4 warps need 137 and 110 us for the last two; 264 or 1,056 programs change little."""
_MAX_SPLITS = 32


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """float32 -> int32 in the same order, NaN above everything. Adding 0.0 makes -0.0 equal to 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the float32 with this key."""
    whole = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _small_float(integer):
    """Convert int32 to float32, for small numbers, at a fraction of the cost of the conversion."""
    return (integer + _ROUNDER_BITS).to(tl.float32, bitcast=True) - _ROUNDER


@triton.jit
def _log(exponent, fraction):
    tail = fraction * _LOG_TAIL[0] + _LOG_TAIL[1]
    for power in tl.static_range(2, 7):
        tail = tail * fraction + _LOG_TAIL[power]
    return ((tail * fraction - 0.5) * (fraction * fraction) + fraction) + _small_float(exponent) * _LOG_2


@triton.jit
def _split(x):
    offset = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    return offset >> 23, ((offset & 0x7FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _uniform(words):
    return tl.minimum(tl.maximum(words.to(tl.float32) * 2.0**-32, 2.0**-33), 1.0 - 2.0**-24)


@triton.jit
def _gumbel(words):
    below = 0.0 - _uniform(words)
    exponent, fraction = _split(below + 1.0)
    exponent, fraction = _split(0.0 - _log(exponent, tl.where(exponent == 0, below, fraction)))
    return 0.0 - _log(exponent, fraction)


@triton.jit
def _noise_bound(words):
    """Return slightly more than the Gumbel noise of these words, without logarithms.

    -log(-log1p(-u)) < -log(u), and log2((1 + f) * 2**e) >= e + f, which the bits of a float32 spell, shifted by 127.
    """
    bits = _uniform(words).to(tl.int32, bitcast=True) >> 8
    # As in _small_float, for numbers below 2**23.
    digits = (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return (127 * 2.0**15 - digits) * (_LOG_2 * 2.0**-15) + 0.001


@triton.jit
def _mass(shifted):
    shifted = tl.maximum(shifted, -40.0)
    power = (shifted * _LOG2_E + _ROUNDER) - _ROUNDER
    rest = (shifted - power * _LOG_2_HIGH) - power * _LOG_2_LOW
    tail = rest * _EXP_TAIL[0] + _EXP_TAIL[1]
    for index in tl.static_range(2, 5):
        tail = tail * rest + _EXP_TAIL[index]
    bits = ((tail * (rest * rest) + rest) + 1.0).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    whole = (power + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    return (mantissa << 17) >> (127 - (bits >> 23) - whole).to(tl.int64)


@triton.jit
def _noise_words(seed, position, quads):
    zero = quads * 0
    low = zero + (position & _ID_MASK).to(tl.int32)
    high = zero + (position >> 32).to(tl.int32)
    return tl.philox(seed, quads, low, high, zero)


@triton.jit(do_not_specialize=["groups_per_program"])
def group_maxima_kernel(
    logits,
    maxima,
    state,
    groups_per_program,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (r, s): keys of the maxima of some groups of row r and, if s is 0, the row's initial state."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if tl.program_id(1) == 0:
        tl.store(state + row * _STATE + _BEST, _LOWEST)
        tl.store(state + row * _STATE + _MASS, tl.full((), 0, tl.int64))
        tl.store(state + row * _STATE + _TICKET, tl.full((), 0, tl.int64))
    begin = tl.program_id(1) * groups_per_program
    end = tl.minimum(begin + groups_per_program, NUM_GROUPS)
    for first in range(begin, end, _TILE_GROUPS):
        groups = first + tl.arange(0, _TILE_GROUPS)
        tokens = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        x = tl.load(logits + row * STRIDE + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
        tl.store(maxima + row * NUM_GROUPS + groups, tl.max(_key(x, SHIFT), axis=1), mask=groups < end)


@triton.jit
def _first_of(logits_row, maxima, top, VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, SHIFT: tl.constexpr):
    """Return the lowest id of the tokens whose key is `top`, the row's maximum."""
    group = tl.min(tl.where(maxima == top, tl.arange(0, NUM_GROUPS), NUM_GROUPS))
    tokens = group * _GROUP + tl.arange(0, _GROUP)
    x = tl.load(logits_row + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where(_key(x, SHIFT) == top, tokens, VOCAB)).to(tl.int64)


@triton.jit
def _pack(scores, ids):
    """Return scores and ids as int64 in the order (score rising, id falling): the maximum is the winner."""
    return (_key(scores, 0).to(tl.int64) << 32) | (ids.to(tl.int64) ^ _ID_MASK)


@triton.jit
def _dense_best(logits_row, seed, position, top_value, reciprocal, least, begin, end, first_quad, VOCAB: tl.constexpr):
    """Return the packed winner among the Philox blocks [begin, end) of a row without top-k and top-p, whose tokens
    begin with the block `first_quad`.

    A tile is skipped if its tokens stay below the best score so far even with the bound of their noise; of n tiles
    about log(n) are not skipped.
    """
    best = tl.full((_QUADS,), -float("inf"), tl.float32)
    ids = tl.zeros((_QUADS,), tl.int32)
    # Minimum score of the most likely token: its shifted logit is 0 and no noise is below -2.82.
    beaten = tl.full((), -2.9, tl.float32)
    for first in range(begin, end, _QUADS):
        quads = first + tl.arange(0, _QUADS)
        words = _noise_words(seed, position, first_quad + quads)
        most = tl.full((_QUADS,), -float("inf"), tl.float32)
        for place in tl.static_range(4):
            tokens = quads * 4 + place
            x = tl.load(logits_row + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
            most = tl.maximum(most, (x - top_value) * reciprocal + _noise_bound(words[place]))
        if tl.max(most) >= beaten:
            for place in tl.static_range(4):
                tokens = quads * 4 + place
                x = tl.load(logits_row + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
                shifted = (x - top_value) * reciprocal
                scores = _gumbel(words[place]) + shifted
                if least > 0:
                    scores = tl.where(_mass(shifted) >= least, scores, -float("inf"))
                # Tokens come in ascending order, so that the first of equal scores stays.
                better = scores > best
                best = tl.where(better, scores, best)
                ids = tl.where(better, tokens, ids)
            beaten = tl.maximum(beaten, tl.max(best))
    return tl.max(_pack(best, ids))


@triton.jit
def _total_mass(logits_row, top_value, reciprocal, begin, end, VOCAB: tl.constexpr):
    total = tl.zeros((4 * _QUADS,), tl.int64)
    for first in range(begin * 4, end * 4, 4 * _QUADS):
        tokens = first + tl.arange(0, 4 * _QUADS)
        x = tl.load(logits_row + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
        total += _mass((x - top_value) * reciprocal)
    return tl.sum(total)


@triton.jit
def _choose_groups(maxima, chosen, bound, VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Write the numbers of the groups whose maximum reaches `bound`, ascending, to `chosen`. Return how many there
    are."""
    groups = tl.arange(0, NUM_GROUPS)
    reached = (maxima >= bound) & (groups * _GROUP < VOCAB)
    places = tl.cumsum(reached.to(tl.int32), 0) - 1
    # Earlier reads of the list must not overtake the writes, nor the writes later reads.
    tl.debug_barrier()
    tl.store(chosen + places, groups, mask=reached)
    tl.debug_barrier()
    return tl.sum(reached.to(tl.int32))


@triton.jit
def _tile(logits_row, chosen, first, num_chosen, GROUPS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr):
    """Return tokens, float32 logits, keys and validity of some chosen groups: [GROUPS, 64] each."""
    places = first + tl.arange(0, GROUPS)
    groups = tl.load(chosen + places, mask=places < num_chosen, other=0)
    tokens = tl.multiple_of(groups * _GROUP, 64)[:, None] + tl.arange(0, _GROUP)[None, :]
    valid = (places < num_chosen)[:, None] & (tokens < VOCAB)
    x = tl.load(logits_row + tokens, mask=valid, other=-float("inf")).to(tl.float32)
    return tokens, x, _key(x, SHIFT), valid


@triton.jit
def _tally(
    logits_row,
    chosen,
    num_chosen,
    threshold,
    top_value,
    reciprocal,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return how many tokens, or if MASS how much mass, of the chosen groups have a key of at least `threshold`:
    int64."""
    total = tl.zeros((), tl.int64)
    for first in range(0, num_chosen, _TILE_GROUPS):
        _tokens, x, keys, valid = _tile(logits_row, chosen, first, num_chosen, _TILE_GROUPS, VOCAB, SHIFT)
        reached = valid & (keys >= threshold)
        if MASS:
            total += tl.sum(tl.where(reached, _mass((x - top_value) * reciprocal), 0))
        else:
            total += tl.sum(reached.to(tl.int32)).to(tl.int64)
    return total


@triton.jit
def _last_key(
    logits_row,
    chosen,
    num_chosen,
    wanted,
    low,
    high,
    top_value,
    reciprocal,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the largest key in [low, high] at which the tally reaches `wanted`; `low` if there is none."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        tally = _tally(logits_row, chosen, num_chosen, middle.to(tl.int32), top_value, reciprocal, MASS, VOCAB, SHIFT)
        if tally >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _bound(maxima, wanted, low, high):
    """Return the largest key in [low, high] that `wanted` group maxima reach; `low` if there is none."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if tl.sum((maxima >= middle.to(tl.int32)).to(tl.int32)) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _nucleus_limit(top_p, total):
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def _filtered_token(
    logits_row,
    maxima,
    chosen,
    seed,
    position,
    top,
    top_value,
    reciprocal,
    top_k,
    top_p,
    least,
    total,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Draw for a row with top-k or top-p. `total` is its mass, which matters if there is no top-k (`top_k` 0)."""
    # A key that every token reaches, even one with a logit of -inf.
    floor = tl.full((), -0x7F800001 >> SHIFT, tl.int32)
    limit = _nucleus_limit(top_p, total)
    wanted = tl.where(top_k > 0, top_k, _FIRST_GROUPS)
    bound = floor
    num_chosen = tl.zeros((), tl.int32)
    searching = True
    while searching:
        bound = _bound(maxima, wanted, floor, top)
        num_chosen = _choose_groups(maxima, chosen, bound, VOCAB, NUM_GROUPS)
        searching = False
        if (top_k == 0) & (bound > floor):
            searching = _tally(logits_row, chosen, num_chosen, bound, top_value, reciprocal, True, VOCAB, SHIFT) < limit
        wanted *= 8
    # The prefix ends among the tokens whose key is `last`: in ascending order of id, as many as top-k allows, and as
    # long as the mass before each, a multiple of `each`, leaves `room` for top-p.
    last = bound
    ties = tl.full((), 1 << 62, tl.int64)
    each = tl.zeros((), tl.int64)
    room = tl.full((), 1, tl.int64)
    if top_k > 0:
        last = _last_key(logits_row, chosen, num_chosen, top_k, bound, top, top_value, reciprocal, False, VOCAB, SHIFT)
        above = _tally(logits_row, chosen, num_chosen, last + 1, top_value, reciprocal, False, VOCAB, SHIFT)
        ties = top_k - above
    if top_p < 1:
        if top_k > 0:
            above = _tally(logits_row, chosen, num_chosen, last + 1, top_value, reciprocal, True, VOCAB, SHIFT)
            each = _mass((_value(last, SHIFT) - top_value) * reciprocal)
            limit = _nucleus_limit(top_p, above + ties * each)
        final = _last_key(logits_row, chosen, num_chosen, limit, last, top, top_value, reciprocal, True, VOCAB, SHIFT)
        above = _tally(logits_row, chosen, num_chosen, final + 1, top_value, reciprocal, True, VOCAB, SHIFT)
        each = _mass((_value(final, SHIFT) - top_value) * reciprocal)
        room = limit - above
        ties = tl.where(final > last, 1 << 62, ties)
        last = final
    seen = tl.zeros((), tl.int64)
    best = tl.full((), _LOWEST, tl.int64)
    for first in range(0, num_chosen, _DRAWN_GROUPS):
        tokens, x, keys, valid = _tile(logits_row, chosen, first, num_chosen, _DRAWN_GROUPS, VOCAB, SHIFT)
        tied = (valid & (keys == last)).to(tl.int32)
        kept = valid & (keys > last)
        in_groups = tl.sum(tied, axis=1)
        num_tied = tl.sum(in_groups).to(tl.int64)
        if (seen + num_tied > ties) | ((seen + num_tied - 1) * each >= room):
            rank = seen + ((tl.cumsum(in_groups, 0) - in_groups)[:, None] + tl.cumsum(tied, 1)).to(tl.int64)
            kept = kept | ((tied > 0) & (rank <= ties) & ((rank - 1) * each < room))
        else:
            kept = kept | (tied > 0)
        seen += num_tied
        shifted = (x - top_value) * reciprocal
        if least > 0:
            kept = kept & (_mass(shifted) >= least)
        w0, w1, w2, w3 = _noise_words(seed, position, tokens >> 2)
        place = tokens & 3
        words = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
        best = tl.maximum(best, tl.max(_pack(tl.where(kept, _gumbel(words) + shifted, -float("inf")), tokens)))
    return (best & _ID_MASK) ^ _ID_MASK


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens", "flags"])
def draw_kernel(
    logits,
    settings,
    slots,
    positions,
    tokens,
    flags,
    maxima,
    state,
    chosen,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (r, s) of (R, S): part s of the work on row r, or all of it if it cannot be shared and s is 0."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots + row).to(tl.int64)
    # Rows without a slot are processed like greedy ones; their result is discarded at the end.
    own = settings + tl.maximum(slot, 0) * _NUM_SETTINGS
    seed = tl.load(own)
    top_k = tl.load(own + 1)
    top_p = tl.load(own + 2).to(tl.float64, bitcast=True)
    least = tl.load(own + 3)
    reciprocal = tl.load(own + 4).to(tl.int32).to(tl.float32, bitcast=True)
    position = tl.load(positions + row).to(tl.int64)
    top_k = tl.where(top_k < VOCAB, top_k, 0)
    keys = tl.load(maxima + row * NUM_GROUPS + tl.arange(0, NUM_GROUPS))
    top = tl.max(keys)
    flag = tl.where(top >= (0x7F800000 >> SHIFT), _NOT_FINITE, 0)
    flag = tl.where(top <= (-0x7F800001 >> SHIFT), _NOTHING_LEFT, flag)
    flag = tl.where(slot < 0, 0, flag)
    idle = (flag != 0) | (slot < 0)
    logits_row = logits + row * STRIDE
    top_value = _value(top, SHIFT)
    state_row = state + row * _STATE
    quads_per_part = tl.cdiv(tl.cdiv(VOCAB, 4 * _QUADS), tl.num_programs(1)) * _QUADS
    begin = part * quads_per_part
    end = tl.minimum(begin + quads_per_part, tl.cdiv(VOCAB, 4))
    if idle | (reciprocal == 0):
        if part == 0:
            token = _first_of(logits_row, keys, top, VOCAB, NUM_GROUPS, SHIFT)
            tl.store(tokens + row, tl.where(idle, 0, token))
            tl.store(flags + row, flag)
    elif (top_k > 0) | (top_p < 1):
        alone = part == 0
        total = tl.zeros((), tl.int64)
        if top_k == 0:
            tl.atomic_add(
                state_row + _MASS, _total_mass(logits_row, top_value, reciprocal, begin, end, VOCAB), sem="acq_rel"
            )
            alone = tl.atomic_add(state_row + _TICKET, 1, sem="acq_rel") == tl.num_programs(1) - 1
            if alone:
                total = tl.atomic_add(state_row + _MASS, 0, sem="acq_rel")
        if alone:
            token = _filtered_token(
                logits_row,
                keys,
                chosen + row * NUM_GROUPS,
                seed,
                position,
                top,
                top_value,
                reciprocal,
                top_k,
                top_p,
                least,
                total,
                VOCAB,
                NUM_GROUPS,
                SHIFT,
            )
            tl.store(tokens + row, token)
            tl.store(flags + row, 0)
    else:
        best = _dense_best(logits_row, seed, position, top_value, reciprocal, least, begin, end, 0, VOCAB)
        tl.atomic_max(state_row + _BEST, best, sem="acq_rel")
        if tl.atomic_add(state_row + _TICKET, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            best = tl.atomic_max(state_row + _BEST, _LOWEST, sem="acq_rel")
            tl.store(tokens + row, (best & _ID_MASK) ^ _ID_MASK)
            tl.store(flags + row, 0)


def sample(
    logits: Tensor, settings: Tensor, slots: Tensor | None, positions: Tensor, tokens: Tensor, flags: Tensor
) -> None:
    """See `kernels.sampling.sample`. `logits` may have any stride between rows, which are contiguous themselves."""
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    groups, state = find_maxima(logits, vocab_size)
    launch(
        draw_kernel,
        (num_rows, draw_splits(num_rows, vocab_size), 1),
        (
            logits,
            settings,
            positions if slots is None else slots,
            positions,
            tokens,
            flags,
            groups,
            state,
            torch.empty_like(groups),
        ),
        num_warps=DRAW_WARPS,
        fp_fusion=False,
        HAS_SLOTS=slots is not None,
        **sizes_of(logits, vocab_size),
    )


def draw_splits(num_rows: int, num_tokens: int) -> int:
    """Return the number of programs that share a row."""
    parts: int = -(-num_tokens // (4 * _QUADS.value))
    return max(1, min(_MAX_SPLITS, _DRAW_PROGRAMS // num_rows, parts))


def sizes_of(logits: Tensor, vocab_size: int) -> dict[str, Any]:
    """Return the constexprs of kernels that read groups of the first `vocab_size` logits of each row."""
    return {
        "VOCAB": vocab_size,
        # For a single row torch may report any stride.
        "STRIDE": logits.stride(0) if len(logits) > 1 else logits.shape[1],
        "NUM_GROUPS": triton.next_power_of_2(max(-(-vocab_size // _GROUP.value), _TILE_GROUPS.value)),
        "SHIFT": _SHIFTS[logits.dtype],
    }


def find_maxima(logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return keys of the maxima of groups of the first `vocab_size` logits of each row, and the rows' initial states.
    There is at least one row."""
    num_rows, sizes = len(logits), sizes_of(logits, vocab_size)
    num_groups = sizes["NUM_GROUPS"]
    tiles = num_groups // _TILE_GROUPS.value
    maxima_splits = max(1, min(_MAX_SPLITS, _MAXIMA_PROGRAMS // num_rows, tiles))
    groups_per_program = -(-tiles // maxima_splits) * _TILE_GROUPS.value
    maxima = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
    state = torch.empty((num_rows, _STATE.value), dtype=torch.int64, device=logits.device)
    launch(
        group_maxima_kernel,
        (num_rows, -(-num_groups // groups_per_program), 1),
        (logits, maxima, state),
        (groups_per_program,),
        num_warps=_MAXIMA_WARPS,
        **sizes,
    )
    return maxima, state
