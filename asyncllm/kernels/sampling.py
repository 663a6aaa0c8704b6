"""Sampling: seeded Gumbel-max draws, filters, penalties and log-probabilities over rows of logits.

A row of logits goes through these steps in order: penalties, logit bias, bans (bad words, early stop tokens),
temperature, top-k, top-p (over the tokens left by top-k), min-p, and the draw. Reported log-probabilities are the
model's own: `token_logprobs` takes the logits before the first of these steps.

A row's draw depends only on its logits, its seed and its position, never on the rest of the batch: noise is
counter-based (Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and keyed by (seed,
position, token id). Among equal tokens the lower id comes first.

The same logits give the same token on every device and in every build of torch: logarithm and exponential are our own
float32 polynomials, made of single additions, subtractions and multiplications in a fixed order, and probability masses
are summed as integers, for which the order of addition does not matter.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncllm.kernels.dispatch import op

__all__ = [
    "add_bias",
    "all_words",
    "apply_min_p",
    "ban",
    "draw_all",
    "draw_sorted",
    "gumbel_noise",
    "gumbel_noise_at",
    "keep_only",
    "mass",
    "pack",
    "pack_settings",
    "penalize",
    "philox",
    "sample",
    "shift",
    "token_logprobs",
    "top_tokens",
    "uniform",
    "unpack",
]

_WORD = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

NOT_FINITE, NOTHING_LEFT = 1, 2
"""Flags of rows that cannot be sampled: a logit is NaN or infinity; all logits are minus infinity."""

NUM_SETTINGS = 5
"""Columns of the settings table: seed, top-k, bits of the float64 top-p, minimum mass (min-p), bits of the float32
reciprocal temperature, which is 0 for a greedy row."""

_SMALLEST_NORMAL = 2.0**-126
_ONE = 2**40
"""Mass of the most likely token. The masses of up to 2**22 tokens sum to less than the maximum of int64."""

LOG_TAIL = (
    0.09048784524202347,
    -0.1403089165687561,
    0.147038996219635,
    -0.16602718830108643,
    0.19984222948551178,
    -0.2500070333480835,
    0.33333414793014526,
)
"""log(1 + f) = f - f**2 / 2 + f**3 * tail(f) for 1 + f from sqrt(1/2) to sqrt(2); highest power first.

Interpolates at Chebyshev nodes with a relative error below 1.3e-7; all coefficients are float32."""

EXP_TAIL = (0.001392637612298131, 0.008363333530724049, 0.04166655242443085, 0.16666576266288757, 0.5)
"""exp(r) = 1 + r + r**2 * tail(r) for |r| <= log(2) / 2, fitted in the same way, with an error below 1.1e-8."""

LOG_2, LOG2_E = 0.6931471824645996, 1.4426950216293335
LOG_2_HIGH, LOG_2_LOW = 0.693359375, -0.00021219444170128554
"""log(2) in two parts; the first, times a small integer, is exact."""
ROUNDER = 12582912.0
"""1.5 * 2**23: adding and subtracting it rounds a small float32 to an integer."""
SQRT_HALF_BITS = 0x3F3504F3

_NUCLEUS_WIDTH = 256
"""Number of most likely tokens in which top-p is tried first; a row with a wider nucleus sorts its whole vocabulary."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(seeds: Tensor, counter: Words) -> Words:
    """Philox4x32-10: four 32-bit words, as int64 in [0, 2**32), for each 64-bit seed and 128-bit counter.

    `seeds` and the counter words (int64, lowest first) broadcast; results have the shape of all five. They equal those
    of Random123 and of Triton's `tl.philox(seed, c0, c1, c2, c3)`.
    """
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64, but its bits are right, so masks recover both halves.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((p1 >> 32) ^ (c1 ^ k0)) & _WORD
        c2 = ((p0 >> 32) ^ (c3 ^ k1)) & _WORD
        c1, c3 = p1 & _WORD, p0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """Map 32-bit words (int64) to float32 in the open interval (0, 1), finest near 0."""
    return (words.to(torch.float32) * 2.0**-32).clamp_(2.0**-33, 1.0 - 2.0**-24)


def _gumbel(words: Tensor) -> Tensor:
    # -log(-log1p(-u)): large values, which decide the draw, come from u near 0, where float32 resolves every word.
    below = uniform(words).neg_()
    exponents, fractions = _split(below + 1.0)
    # Where 1 - u has exponent 0, -u is its fraction without the rounding of the sum.
    exponential = _log(exponents, torch.where(exponents == 0, below, fractions)).neg_()
    return _log(*_split(exponential)).neg_()


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive normal float32 `values` as (1 + f) * 2**e with 1 + f in [sqrt(1/2), sqrt(2)): e int32, f
    float32."""
    offset = values.view(torch.int32) - SQRT_HALF_BITS
    exponents = offset >> 23
    return exponents, offset.bitwise_and_(0x7FFFFF).add_(SQRT_HALF_BITS).view(torch.float32).sub_(1.0)


def _log(exponents: Tensor, fractions: Tensor) -> Tensor:
    tail = _horner(LOG_TAIL, fractions)
    tail.mul_(fractions).sub_(0.5).mul_(fractions * fractions).add_(fractions)
    return tail.add_(exponents.to(torch.float32).mul_(LOG_2))


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    # One product or sum at a time: a fused multiply-add would round once where other devices round twice.
    value = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        value.mul_(x).add_(coefficient)
    return value


def mass(shifted: Tensor) -> Tensor:
    """Return exp(shifted) as a multiple of 2**-40, rounded down, for float32 `shifted` <= 0: int64 in [0, 2**40]."""
    # Below -40 it is 0.
    shifted = shifted.clamp_min(-40.0)
    powers = (shifted * LOG2_E).add_(ROUNDER).sub_(ROUNDER)
    rest = (shifted - powers * LOG_2_HIGH).sub_(powers * LOG_2_LOW)
    value = _horner(EXP_TAIL, rest).mul_(rest * rest).add_(rest).add_(1.0)
    bits = value.view(torch.int32)
    mantissas = (bits & 0x7FFFFF).bitwise_or_(0x800000).to(torch.int64)
    return mantissas.bitwise_left_shift_(17).bitwise_right_shift_(127 - (bits >> 23) - powers.to(torch.int32))


def _noise_words(seeds: Tensor, positions: Tensor, quads: Tensor) -> Words:
    seeds, positions = seeds.unsqueeze(-1), positions.unsqueeze(-1)
    return philox(seeds, (quads, positions, positions >> 32, torch.zeros_like(positions)))


def all_words(seeds: Tensor, positions: Tensor, vocab_size: int, *, first: int = 0) -> Tensor:
    """Return the noise words [R, vocab_size] of the tokens from `first`, a multiple of 4, on."""
    quads = torch.arange(first // 4, (first + vocab_size + 3) // 4, device=seeds.device).unsqueeze(0)
    return torch.stack(_noise_words(seeds, positions, quads), dim=-1).flatten(1)[:, :vocab_size]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [R, vocab_size], for `seeds` [R] and `positions` [R], both int64.

    Token id t takes word t % 4 of the Philox block with counter (t // 4, position low, position high, 0).
    """
    return _gumbel(all_words(seeds, positions, vocab_size))


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the entries of `gumbel_noise` at `token_ids` [R, K] int64: float32 [R, K]."""
    words = torch.stack(_noise_words(seeds, positions, token_ids >> 2), dim=-1)
    return _gumbel(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def top_tokens(logits: Tensor, width: int) -> Tensor:
    """Return the ids of the `width` largest entries of each row of float32 `logits` [R, V], in falling order, lower ids
    first among equals.

    Returns int64 [R, min(width, V)].
    """
    vocab_size = logits.shape[-1]
    keys = pack(logits, torch.arange(vocab_size, device=logits.device))
    best = keys.topk(width, dim=-1).values if width < vocab_size else keys.sort(dim=-1, descending=True).values
    return _WORD - (best & _WORD)


def pack(logits: Tensor, ids: Tensor) -> Tensor:
    """Return float32 `logits` and token `ids` as int64 ordered by (value rising, id falling), so that neither topk nor
    sort has to choose among equals. `unpack` undoes it, except for the sign of a zero."""
    # Adding 0.0 turns -0.0 into 0.0; the xor makes the float's bits ascend like a signed integer.
    bits = (logits + 0.0).view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(torch.int64) << 32) + (_WORD - ids)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and ids that `pack` packed."""
    ascending = (packed >> 32).to(torch.int32)
    return (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).view(torch.float32), _WORD - (packed & _WORD)


def pack_settings(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> tuple[int, ...]:
    """Return a row of the settings that `sample` reads: NUM_SETTINGS signed 64-bit integers.

    `temperature` 0 and `top_k` 1 mean greedy; `top_k` 0, `top_p` 1 and `min_p` 0 mean no limit. `seed` is taken modulo
    2**64.
    """
    narrow = struct.unpack("f", struct.pack("f", min(temperature, 2.0**126)))[0]
    # The reciprocal is a normal number, so a device's treatment of subnormal ones does not matter.
    reciprocal = 0.0 if narrow == 0 or top_k == 1 else 1.0 / max(narrow, _SMALLEST_NORMAL)
    return (
        (seed + 2**63) % 2**64 - 2**63,
        top_k,
        struct.unpack("q", struct.pack("d", top_p))[0],
        math.ceil(min_p * _ONE),
        struct.unpack("i", struct.pack("f", reciprocal))[0],
    )


@op("sampling:sample")
def sample(
    logits: Tensor, settings: Tensor, slots: Tensor | None, positions: Tensor, tokens: Tensor, flags: Tensor
) -> None:
    """Draw one token per row of `logits` [R, V] (float32, float16 or bfloat16), after penalties, bias and bans.

    -inf means impossible. Row r uses row `slots[r]` of `settings` [N, NUM_SETTINGS] int64 (see `pack_settings`), or row
    r if `slots` is None; `slots` [R] int32 or int64, -1 in rows that only pad the batch. `positions` [R] int32 or int64
    are the positions of the tokens to be drawn. Writes `tokens` [R] int64 and `flags` [R] int32: 0, NOT_FINITE or
    NOTHING_LEFT. The token of a failed row, or of one without a slot, is 0.
    """
    maxima, best = logits.max(dim=-1)
    maxima = maxima.float()
    flags.copy_(torch.where(maxima < torch.inf, maxima.isneginf() * NOTHING_LEFT, NOT_FINITE))
    if slots is not None:
        flags.masked_fill_(slots < 0, 0)
        settings = settings[slots.clamp_min(0)]
    usable = maxima.isfinite() if slots is None else maxima.isfinite() & (slots >= 0)
    tokens.copy_(best.masked_fill_(~usable, 0))
    seeds, top_k, top_p, min_masses, reciprocal = settings.unbind(-1)
    top_p = top_p.contiguous().view(torch.float64)
    reciprocal = reciprocal.to(torch.int32).view(torch.float32)
    drawn = usable & (reciprocal > 0)
    bounded = drawn & (top_k > 0) & (top_k < logits.shape[-1])
    nucleus = drawn & ~bounded & (top_p < 1)
    dense = drawn & ~bounded & ~nucleus
    positions = positions.to(torch.int64)
    if dense.any():
        rows = dense.nonzero().squeeze(-1)
        shifted = shift(logits[rows], maxima[rows], reciprocal[rows])
        words = all_words(seeds[rows], positions[rows], logits.shape[-1])
        tokens[rows] = draw_all(apply_min_p(shifted, None, min_masses[rows]), words)
    if bounded.any():
        rows = bounded.nonzero().squeeze(-1)
        ids = top_tokens(logits[rows].float(), int(top_k[rows].max()))
        shifted = shift(logits[rows].gather(-1, ids), maxima[rows], reciprocal[rows])
        tokens[rows] = draw_sorted(
            shifted, ids, top_k[rows], top_p[rows], min_masses[rows], seeds[rows], positions[rows]
        )
    if nucleus.any():
        rows = nucleus.nonzero().squeeze(-1)
        limit = _limit(top_p[rows], mass(shift(logits[rows], maxima[rows], reciprocal[rows])).sum(dim=-1))
        for width in (_NUCLEUS_WIDTH, logits.shape[-1]):
            ids = top_tokens(logits[rows].float(), width)
            shifted = shift(logits[rows].gather(-1, ids), maxima[rows], reciprocal[rows])
            masses = mass(shifted)
            running = masses.cumsum(dim=-1)
            shifted = _keep_nucleus(shifted, running, limit)
            tokens[rows] = _draw(apply_min_p(shifted, masses, min_masses[rows]), ids, seeds[rows], positions[rows])
            wide = running[:, -1] < limit
            if width >= logits.shape[-1] or not wide.any():
                break
            rows, limit = rows[wide], limit[wide]


def shift(logits: Tensor, maxima: Tensor, reciprocal: Tensor) -> Tensor:
    """Return logits [R, K] minus their rows' maxima [R], times the reciprocal temperatures [R], in float32."""
    # The maximum becomes exactly 0 whatever the temperature, so that a tiny one cannot overflow.
    return (logits.float() - maxima.unsqueeze(-1)).mul_(reciprocal.unsqueeze(-1))


def apply_min_p(shifted: Tensor, masses: Tensor | None, min_masses: Tensor) -> Tensor:
    """Drop tokens whose mass is below `min_masses` (min-p: the most likely token has a mass of one)."""
    if not min_masses.any():
        return shifted
    return shifted.masked_fill((mass(shifted) if masses is None else masses) < min_masses.unsqueeze(-1), -torch.inf)


def _limit(top_p: Tensor, total: Tensor) -> Tensor:
    """Return the mass at which a nucleus ends: `top_p` of `total`, rounded up to int64, or a number that is never
    reached without top-p."""
    limit = (total.to(torch.float64) * top_p).ceil_().to(torch.int64).clamp_min_(1)
    return torch.where(top_p < 1, limit, 2**62)


def _keep_nucleus(shifted: Tensor, running: Tensor, limit: Tensor) -> Tensor:
    """Drop tokens of a falling row before which its `running` mass has already reached the `limit`."""
    return shifted.masked_fill(pad(running[:, :-1] >= limit.unsqueeze(-1), (1, 0), value=False), -torch.inf)


def draw_all(shifted: Tensor, words: Tensor) -> Tensor:
    """Return the Gumbel-max draw over all tokens from `shifted` logits and noise `words` [R, V].

    Torch's own logarithms, which are faster but differ between devices, select the few tokens that can win. Both errors
    together are far below the margin, since the best score is between -3 and 23. On a rank without the row's maximum
    the best score may be lower, but then its winner does not win among all tokens.
    """
    scores = uniform(words).neg_().log1p_().neg_().log_().neg_().add_(shifted)
    rows, ids = (scores >= scores.amax(dim=-1, keepdim=True) - 1e-3).nonzero(as_tuple=True)
    scores = _gumbel(words[rows, ids]).add_(shifted[rows, ids])
    best = scores.new_full((len(shifted),), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    won = scores == best[rows]
    tokens = ids.new_full((len(shifted),), shifted.shape[-1])
    return tokens.scatter_reduce_(0, rows[won], ids[won], "amin")


def draw_sorted(
    shifted: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, min_masses: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Return the Gumbel-max draw over candidates in falling order, with shifted logits [R, K] and tokens `ids` [R, K].
    Only the first `top_k` [R] candidates, the nucleus of `top_p` [R] float64 of their mass, and those of at least
    the mass `min_masses` [R] are drawn."""
    places = torch.arange(ids.shape[-1], device=ids.device)
    shifted = shifted.masked_fill(places >= top_k.unsqueeze(-1), -torch.inf)
    masses = mass(shifted)
    running = masses.cumsum(dim=-1)
    shifted = _keep_nucleus(shifted, running, _limit(top_p, running[:, -1]))
    return _draw(apply_min_p(shifted, masses, min_masses), ids, seeds, positions)


def _draw(shifted: Tensor, ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the Gumbel-max draw over candidates with shifted logits [R, K] and tokens `ids` [R, K]."""
    scores = gumbel_noise_at(seeds, positions, ids).add_(shifted)
    best = scores == scores.amax(dim=-1, keepdim=True)
    return ids.masked_fill(~best, torch.iinfo(torch.int64).max).amin(dim=-1)


def penalize(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Return logits [R, V] after the repetition penalty (CTRL, Keskar et al. 2019) and the two additive penalties
    (OpenAI API).

    `seen` [R, V] bool: tokens of prompt and answer, whose positive logits are divided, and negative ones multiplied,
    by `repetition` [R]. `counts` [R, V] int: occurrences in the answer; `presence` [R] is subtracted once if there is
    any, `frequency` [R] for each. The three are float32.
    """
    factor = torch.where(seen, repetition.unsqueeze(-1), 1.0)
    penalized = torch.where(logits > 0, logits / factor, logits * factor)
    return penalized - (presence.unsqueeze(-1) * (counts > 0) + frequency.unsqueeze(-1) * counts)


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add `values` [N] float32 to `logits` [R, V] in place, at (`rows` [N], `token_ids` [N]) int64, all distinct."""
    logits[rows, token_ids] += values


def ban(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Make the tokens at (`rows` [N], `token_ids` [N]) int64 of `logits` [R, V] impossible, in place."""
    # Assigning the number itself would wait for the device.
    logits.index_put_((rows, token_ids), logits.new_full((), -torch.inf))


@op("grammar_mask:keep_only")
def keep_only(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Make all tokens of `rows` [N] int64, all distinct, of `logits` [R, V] impossible, in place, except those whose
    bits are set in `words` [N, ceil(V / 32)] int32, lowest bit first."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)[:, : logits.shape[-1]]
    logits[rows] = logits[rows].masked_fill_(allowed == 0, -torch.inf)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of `tokens` [R] int64 and of the `num_top` most likely tokens under `logits` [R, V]
    float32.

    Returns those of `tokens` [R], those of the most likely [R, num_top] in falling order, and their ids [R, num_top].
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # Ranked by logit: rounding in log_softmax may make unequal logits equal.
    ids = top_tokens(logits, num_top)
    return chosen, logprobs.gather(-1, ids), ids
