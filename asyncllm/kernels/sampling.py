"""Sampling: seeded Gumbel-max draws, filters, penalties and log-probabilities over rows of logits.

A row of logits goes through, in this order: penalties, logit bias, bans (bad words, stop tokens that come too early),
temperature, top-k, top-p (of what top-k left), min-p, and the draw. Reported log-probabilities are those of the model
itself: `token_logprobs` takes the logits as they were before the first of these.

What is drawn for a row depends on its logits, its seed and its position alone, never on the rest of the batch: noise is
counter-based (Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and keyed by
(seed, position, token id). Wherever two tokens are equal the lower id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "add_bias",
    "ban",
    "gumbel_noise",
    "gumbel_noise_at",
    "penalize",
    "philox",
    "sample",
    "token_logprobs",
    "top_tokens",
    "uniform",
]

_WORD = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

_NUCLEUS_WIDTH = 256
"""Most likely tokens among which top-p is tried first; a row whose nucleus is wider sorts its whole vocabulary."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(seeds: Tensor, counter: Words) -> Words:
    """Philox4x32-10: four 32-bit words, as int64 in [0, 2**32), for each 64-bit seed and 128-bit counter.

    `seeds` and the counter words (int64, lowest first) broadcast; results have the shape of all five. They equal those
    of Random123 and of Triton's `tl.philox(seed, c0, c1, c2, c3)`.
    """
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64; its bits are right all the same, so masks recover both halves.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((p1 >> 32) ^ (c1 ^ k0)) & _WORD
        c2 = ((p0 >> 32) ^ (c3 ^ k1)) & _WORD
        c1, c3 = p1 & _WORD, p0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """32-bit words (int64) to float32 in the open interval (0, 1), finest near 0."""
    return (words.to(torch.float32) * 2.0**-32).clamp_(2.0**-33, 1.0 - 2.0**-24)


def _gumbel(words: Tensor) -> Tensor:
    # -log(-log1p(-u)): large values, which decide the draw, come from u near 0, where float32 resolves every word.
    return uniform(words).neg_().log1p_().neg_().log_().neg_()


def _noise_words(seeds: Tensor, positions: Tensor, quads: Tensor) -> Words:
    seeds, positions = seeds.unsqueeze(-1), positions.unsqueeze(-1)
    return philox(seeds, (quads, positions, positions >> 32, torch.zeros_like(positions)))


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, vocab_size], for `seeds` [R] and `positions` [R], both int64.

    Token id t takes word t % 4 of the Philox block with counter (t // 4, position low, position high, 0).
    """
    quads = torch.arange((vocab_size + 3) // 4, device=seeds.device).unsqueeze(0)
    words = torch.stack(_noise_words(seeds, positions, quads), dim=-1)
    return _gumbel(words.flatten(1)[:, :vocab_size])


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The entries of `gumbel_noise` at `token_ids` [R, K] int64: float32 [R, K]."""
    words = torch.stack(_noise_words(seeds, positions, token_ids >> 2), dim=-1)
    return _gumbel(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def top_tokens(logits: Tensor, width: int) -> Tensor:
    """Ids of the `width` largest of each row of float32 `logits` [R, V], falling, lower ids first among equals.

    Returns int64 [R, min(width, V)].
    """
    vocab_size = logits.shape[-1]
    # Adding 0.0 turns -0.0 into 0.0; the xor makes the float's bits ascend as a signed integer does.
    bits = (logits + 0.0).view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # Keys are unique, so that neither topk nor sort has a choice among equals.
    keys = (ascending.to(torch.int64) << 32) + torch.arange(_WORD, _WORD - vocab_size, -1, device=logits.device)
    best = keys.topk(width, dim=-1).values if width < vocab_size else keys.sort(dim=-1, descending=True).values
    return _WORD - (best & _WORD)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw one token per row: int64 [R].

    `logits` [R, V] float32, after penalties, bias and bans; -inf means impossible, and each row has a finite maximum.
    `temperature` [R] float32 (0: greedy), `top_k` [R] int64 (0: no limit, 1: greedy), `top_p` [R] and `min_p` [R]
    float64 (1 and 0: no limit), `seeds` [R] int64, `positions` [R] int64, those of the tokens to be drawn.
    """
    maxima, tokens = logits.max(dim=-1)
    drawn = (temperature > 0) & (top_k != 1)
    bounded = drawn & (top_k > 0)
    nucleus = drawn & ~bounded & (top_p < 1)
    dense = drawn & ~bounded & ~nucleus
    if dense.any():
        rows = dense.nonzero().squeeze(-1)
        shifted = _shift(logits[rows], maxima[rows], temperature[rows])
        noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[-1])
        tokens[rows] = noise.add_(_cut(shifted, min_p[rows])).max(dim=-1).indices
    if bounded.any():
        rows = bounded.nonzero().squeeze(-1)
        ids = top_tokens(logits[rows], int(top_k[rows].max()))
        shifted = _shift(logits[rows].gather(-1, ids), maxima[rows], temperature[rows])
        ranks = torch.arange(ids.shape[-1], device=ids.device)
        shifted = shifted.masked_fill(ranks >= top_k[rows].unsqueeze(-1), -torch.inf)
        # The last running sum, not a sum of its own: its rounding does not depend on how wide the others' k makes it.
        mass = shifted.double().exp_().cumsum(dim=-1)
        shifted = _keep_nucleus(shifted, mass, mass[:, -1], top_p[rows])
        tokens[rows] = _draw(_cut(shifted, min_p[rows]), ids, seeds[rows], positions[rows])
    if nucleus.any():
        rows = nucleus.nonzero().squeeze(-1)
        total = _shift(logits[rows], maxima[rows], temperature[rows]).double().exp_().sum(dim=-1)
        for width in (_NUCLEUS_WIDTH, logits.shape[-1]):
            ids = top_tokens(logits[rows], width)
            shifted = _shift(logits[rows].gather(-1, ids), maxima[rows], temperature[rows])
            mass = shifted.double().exp_().cumsum(dim=-1)
            shifted = _keep_nucleus(shifted, mass, total, top_p[rows])
            tokens[rows] = _draw(_cut(shifted, min_p[rows]), ids, seeds[rows], positions[rows])
            wide = mass[:, -1] < top_p[rows] * total
            if width >= logits.shape[-1] or not wide.any():
                break
            rows, total = rows[wide], total[wide]
    return tokens


def _shift(logits: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    # The maximum becomes exactly 0 whatever the temperature, so that a tiny one cannot overflow.
    return (logits - maxima.unsqueeze(-1)) / temperature.unsqueeze(-1)


def _cut(shifted: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens below `min_p` times the probability of the most likely one, whose shifted logit is 0."""
    if not min_p.any():
        return shifted
    return shifted.masked_fill(shifted.double() < min_p.log().unsqueeze(-1), -torch.inf)


def _keep_nucleus(shifted: Tensor, mass: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """Drop tokens before which the running `mass` of the falling row has reached `top_p` of `total` already."""
    limit = torch.where(top_p < 1, top_p * total, torch.inf).unsqueeze(-1)
    return shifted.masked_fill(pad(mass[:, :-1] >= limit, (1, 0), value=False), -torch.inf)


def _draw(shifted: Tensor, ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Gumbel-max over candidates: shifted logits [R, K] of the tokens `ids` [R, K]."""
    scores = gumbel_noise_at(seeds, positions, ids).add_(shifted)
    best = scores == scores.amax(dim=-1, keepdim=True)
    return ids.masked_fill(~best, torch.iinfo(torch.int64).max).amin(dim=-1)


def penalize(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits [R, V] after the repetition penalty (CTRL, Keskar et al. 2019), then the two additive ones (OpenAI API).

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
    logits[rows, token_ids] = -torch.inf


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` [R] int64 and of the `num_top` most likely tokens under `logits` [R, V] float32.

    Returns those of `tokens` [R], those of the most likely [R, num_top] in falling order, and their ids [R, num_top].
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # Ranked by logit: rounding in log_softmax may make unequal logits equal.
    ids = top_tokens(logits, num_top)
    return chosen, logprobs.gather(-1, ids), ids
