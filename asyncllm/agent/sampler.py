"""The sampler: every sequence's sampling state, addressed by slot, and the draw of a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.token_history import TokenHistory
from asyncllm.batch import SamplingParams, SlotStart, TokenLogprobs
from asyncllm.kernels import sampling

__all__ = ["NOT_FINITE", "Sampled", "Sampler", "rank_tokens"]

_PENALTIES, _BIAS, _BAD_WORDS, _EARLY_STOPS = 1, 2, 4, 8

NOT_FINITE = (
    "The model's logits for this sequence are not finite (NaN or infinity), so no token can be chosen. Damaged weights "
    "or activations beyond the range of their type are the usual causes: check the checkpoint, or use dtype='float32'."
)
_ALL_BANNED = (
    "No token is left to choose from: bad words and min_new_tokens exclude all that the model allows. Loosen them."
)


class Sampled(NamedTuple):
    """What one step drew, in the order of its rows."""

    tokens: Tensor
    """[R] int64, on the device; a valid id even in a row that failed."""
    token_list: list[int]
    """The same on the host."""
    logprobs: dict[int, TokenLogprobs]
    """Slot -> log-probabilities, for slots that ask for them and did not fail."""
    errors: dict[int, str]
    """Slot -> why its token is meaningless."""


class Sampler:
    """Sampling state of `num_slots` slots over a vocabulary of `vocab_size` tokens.

    `start` sets a slot up and `sample` draws for any set of distinct slots. What a slot draws is a function of its own
    logits, parameters and history, whatever other slots ask for.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._plain = np.ones(num_slots, np.bool_)
        """Slots for which the largest logit is all there is to find."""
        self._greedy = np.ones(num_slots, np.bool_)
        self._edits = np.zeros(num_slots, np.uint8)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float64)
        self._seed = np.zeros(num_slots, np.int64)
        self._penalties = np.zeros((3, num_slots), np.float32)
        self._free_stop_position = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stops: dict[int, NDArray[np.int64]] = {}
        self._faults: dict[int, str] = {}
        self._history = TokenHistory(num_slots, vocab_size, device)

    def start(self, start: SlotStart) -> None:
        """Give the slot to a new sequence; nothing of its former owner remains."""
        slot, params = start.slot, start.params
        self._greedy[slot] = params.greedy
        self._temperature[slot] = 0.0 if params.greedy else params.temperature
        self._top_k[slot] = min(params.top_k, self._vocab_size)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = _signed64(params.seed)
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._penalties[:, slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        # Positions count from 0: the answer's token number n, from 0, sits at num_prompt + n.
        self._free_stop_position[slot] = start.num_prompt + params.min_new_tokens
        self._bias.pop(slot, None)
        self._stops.pop(slot, None)
        self._faults.pop(slot, None)
        self._edits[slot] = 0
        self._plain[slot] = False
        fault = _fault(params, self._vocab_size)
        if fault:
            self._faults[slot] = fault
            self._history.clear(slot)
            return
        penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        if params.logit_bias:
            ids, values = zip(*dict(params.logit_bias).items(), strict=True)
            self._bias[slot] = np.array(ids, np.int64), np.array(values, np.float32)
        if params.min_new_tokens and params.stop_token_ids:
            self._stops[slot] = np.array(params.stop_token_ids, np.int64)
        self._edits[slot] = (
            _PENALTIES * penalized
            | _BIAS * bool(params.logit_bias)
            | _BAD_WORDS * bool(params.bad_words)
            | _EARLY_STOPS * (slot in self._stops)
        )
        self._plain[slot] = params.greedy and params.logprobs is None and not self._edits[slot]
        self._history.start(start, counted=penalized)

    def sample(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Sampled:
        """Draw one token for each of `slots` [R], all distinct, from `logits` [R, V] float32, which stay as they are.

        `positions` [R] are the absolute positions of the tokens to be drawn.
        """
        maxima, tokens = logits.max(dim=-1)
        usable = np.isfinite(maxima.numpy(force=True))
        all_usable = usable.all()
        if all_usable and self._plain[slots].all():
            return Sampled(tokens, tokens.tolist(), {}, {})
        errors: dict[int, str] = {}
        if not all_usable:
            errors = dict.fromkeys(slots[~usable].tolist(), NOT_FINITE)
        if self._faults:
            errors |= {slot: self._faults[slot] for slot in slots.tolist() if slot in self._faults}
        edited = (self._edits[slots] != 0) & usable
        drawn = ~(self._greedy[slots] | edited) & usable
        if drawn.any():
            self._draw(tokens, logits, np.flatnonzero(drawn), slots, positions)
        any_edited = bool(edited.any())
        if any_edited:
            rows = np.flatnonzero(edited)
            index, owners, places = self._tensor(rows), slots[rows], positions[rows]
            processed = self._edit(logits[index], owners, places)
            best, chosen = processed.max(dim=-1)
            stuck = best.isneginf().numpy(force=True)
            errors |= dict.fromkeys(owners[stuck].tolist(), _ALL_BANNED)
            drawn = ~(self._greedy[owners] | stuck)
            if drawn.any():
                self._draw(chosen, processed, np.flatnonzero(drawn), owners, places)
            tokens[index] = chosen
        token_list: list[int] = tokens.tolist()
        if any_edited:
            self._history.extend(slots, tokens, token_list)
        return Sampled(tokens, token_list, self._logprobs(logits, tokens, slots, errors), errors)

    def _draw(
        self,
        tokens: Tensor,
        logits: Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Draw from some `rows` of `logits` and write the result into the same rows of `tokens`."""
        index = self._tensor(rows)
        owners = slots[rows]
        tokens[index] = sampling.sample(
            logits if len(rows) == len(slots) else logits[index],
            self._tensor(self._temperature[owners]),
            self._tensor(self._top_k[owners]),
            self._tensor(self._top_p[owners]),
            self._tensor(self._min_p[owners]),
            self._tensor(self._seed[owners]),
            self._tensor(positions[rows]),
        )

    def _edit(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Apply penalties, bias and bans to `logits`, a copy of the rows that ask for any of them."""
        edits = self._edits[slots]
        penalized = np.flatnonzero(edits & _PENALTIES)
        if len(penalized):
            index, owners = self._tensor(penalized), slots[penalized]
            seen, counts = self._history.counts(owners)
            logits[index] = sampling.penalize(logits[index], seen, counts, *self._tensor(self._penalties[:, owners]))
        biased = np.flatnonzero(edits & _BIAS)
        if len(biased):
            entries = [self._bias[slot] for slot in slots[biased].tolist()]
            rows, ids = self._flat(biased, [ids for ids, _ in entries])
            sampling.add_bias(logits, rows, ids, self._tensor(np.concatenate([values for _, values in entries])))
        early = np.flatnonzero(((edits & _EARLY_STOPS) != 0) & (positions < self._free_stop_position[slots]))
        if len(early):
            sampling.ban(logits, *self._flat(early, [self._stops[slot] for slot in slots[early].tolist()]))
        worded = np.flatnonzero(edits & _BAD_WORDS)
        if len(worded):
            sampling.ban(logits, *self._flat(worded, [self._history.banned(slot) for slot in slots[worded].tolist()]))
        return logits

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, slots: NDArray[np.int64], errors: dict[int, str]
    ) -> dict[int, TokenLogprobs]:
        asked = self._num_logprobs[slots]
        rows = np.flatnonzero(asked >= 0)
        if not len(rows):
            return {}
        index = self._tensor(rows)
        ranked = rank_tokens(logits[index], tokens[index], asked[rows].tolist())
        return {slot: entry for slot, entry in zip(slots[rows].tolist(), ranked, strict=True) if slot not in errors}

    def _flat(self, rows: NDArray[np.int64], ids: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Row and token id of every entry of `ids`, of which there is one array per row."""
        lengths = [len(entry) for entry in ids]
        return self._tensor(np.repeat(rows, lengths)), self._tensor(np.concatenate(ids))

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def rank_tokens(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Per row of raw `logits` [R, V]: (id, log-probability) of its entry of `tokens` [R], then of the `num_top[row]`
    most likely tokens in falling order, among which the former may appear again."""
    chosen, top, ids = sampling.token_logprobs(logits, tokens, max(num_top))
    return [
        [(token, logprob), *zip(row_ids[:width], row_top[:width], strict=True)]
        for token, logprob, row_ids, row_top, width in zip(
            tokens.tolist(), chosen.tolist(), ids.tolist(), top.tolist(), num_top, strict=True
        )
    ]


def _signed64(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _fault(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be sampled with; out of range ids would reach into other rows or fail the step."""
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "stop_token_ids": list(params.stop_token_ids),
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{name} holds token id {token}, but the model's ids go from 0 to {vocab_size - 1}. Remove it."
    return None
