"""SlotParams: the sampling parameters of all slots on the host, and errors for parameters that cannot be met."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncllm.agent.sampling.grammar_masks import GrammarMasks
from asyncllm.kernels import sampling, shortlist
from asyncllm.protocol import Grammar, Progress, SamplingParams, SlotStart

__all__ = [
    "ALLOWED",
    "BAD_WORDS",
    "BIAS",
    "EARLY_STOPS",
    "GRAMMAR",
    "LONG_BAD_WORDS",
    "NOT_FINITE",
    "PENALTIES",
    "SlotParams",
]

PENALTIES, BIAS, BAD_WORDS, LONG_BAD_WORDS, EARLY_STOPS, GRAMMAR, ALLOWED = 1, 2, 4, 8, 16, 32, 64
"""Bits of `SlotParams.edits`: the kinds of edits to a slot's logits. Long bad words have several tokens."""

NOT_FINITE = (
    "The model's logits for this sequence are not finite (NaN or infinity), so no token can be chosen. Damaged weights "
    "or activations beyond the range of their type are the usual causes: check the checkpoint, or use dtype='float32'."
)
_ALL_BANNED = (
    "No token is left to choose from: bad words, allowed_token_ids, min_new_tokens and response_format exclude all "
    "that the model allows. Loosen them."
)
_DEAD_END = (
    "The answer cannot go on in what response_format allows: it is too complex, or its tokens take too long to tell "
    "apart. Simplify it."
)


class SlotParams:
    """Parameters by slot, stored as arrays over all slots where steps look them up."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.plain = np.ones(num_slots, np.bool_)
        """Slots that draw the largest logit."""
        self.listed = np.ones(num_slots, np.bool_)
        """Slots that ranks can draw for from short lists."""
        self.edits = np.zeros(num_slots, np.uint8)
        self.settings = np.zeros((num_slots, sampling.NUM_SETTINGS), np.int64)
        """Inputs of `sampling.sample`."""
        self.penalties = np.zeros((3, num_slots), np.float32)
        """Repetition, presence and frequency penalty."""
        self.free_stop_position = np.zeros(num_slots, np.int64)
        """The first position at which stop tokens may be drawn."""
        self.num_logprobs = np.full(num_slots, -1, np.int64)
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.stops: dict[int, NDArray[np.int64]] = {}
        self.allowed: dict[int, NDArray[np.int32]] = {}
        """Slot -> the bits of the only tokens that it may draw, as `sampling.keep_only` takes them."""
        self.grammars: dict[int, Progress] = {}
        """Slot -> progress of its answer in its grammar."""
        self.masks = GrammarMasks(vocab_size)
        """Computes the tokens that `grammars` allow next."""
        self._takes_forced: set[int] = set()
        """Slots with grammars whose forced tokens need no step each, because no log-probabilities are wanted and
        nothing can ban these tokens."""
        self.faults: dict[int, str] = {}
        """Slot -> why its parameters are invalid for this model."""

    def start(self, start: SlotStart) -> None:
        """Store the parameters of the slot's new owner, and remove everything of the former one."""
        slot, params = start.slot, start.params
        temperature = 0.0 if params.greedy else params.temperature
        top_k = min(params.top_k, self._vocab_size)
        self.settings[slot] = sampling.pack_settings(temperature, top_k, params.top_p, params.min_p, params.seed)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.penalties[:, slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        # Positions count from 0: the answer's token number n, from 0, is at num_prompt + n.
        self.free_stop_position[slot] = start.num_prompt + params.min_new_tokens
        self.bias.pop(slot, None)
        self.stops.pop(slot, None)
        self.allowed.pop(slot, None)
        self.grammars.pop(slot, None)
        self._takes_forced.discard(slot)
        self.faults.pop(slot, None)
        self.edits[slot] = 0
        self.plain[slot] = self.listed[slot] = False
        fault = _fault(params, self._vocab_size)
        if fault:
            self.faults[slot] = fault
            return
        penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        if params.logit_bias:
            ids, values = zip(*dict(params.logit_bias).items(), strict=True)
            self.bias[slot] = np.array(ids, np.int64), np.array(values, np.float32)
        if params.min_new_tokens and params.stop_token_ids:
            self.stops[slot] = np.array(params.stop_token_ids, np.int64)
        if params.allowed_token_ids:
            self.allowed[slot] = _bits(params.allowed_token_ids, self._vocab_size)
        if params.grammar is not None:
            grammar: Grammar = params.grammar
            self.grammars[slot] = grammar.start(start.token_ids[start.num_prompt :])
            if params.logprobs is None and not params.bad_words and not params.allowed_token_ids:
                self._takes_forced.add(slot)
        self.edits[slot] = (
            PENALTIES * penalized
            | BIAS * bool(params.logit_bias)
            | BAD_WORDS * bool(params.bad_words)
            | LONG_BAD_WORDS * any(len(word) > 1 for word in params.bad_words)
            | EARLY_STOPS * (slot in self.stops)
            | GRAMMAR * (params.grammar is not None)
            | ALLOWED * bool(params.allowed_token_ids)
        )
        untouched = params.logprobs is None and not self.edits[slot]
        self.plain[slot] = params.greedy and untouched
        bounded = 0 < top_k <= min(shortlist.LENGTH, self._vocab_size - 1)
        self.listed[slot] = untouched and (
            temperature == 0 or bounded or (params.top_p >= 1 and top_k in (0, self._vocab_size))
        )

    def observe(self, slots: Sequence[int], tokens: Sequence[int], min_forced: int) -> dict[int, list[int]]:
        """Record a token that each of `slots` has drawn. Return the tokens forced to follow it, where there are at
        least `min_forced` of them; 0: none (`StepOutput.forced`)."""
        forced: dict[int, list[int]] = {}
        if self.grammars:
            for slot, token in zip(slots, tokens, strict=True):
                if slot in self.grammars:
                    progress = self.grammars[slot]
                    progress.consume(token)
                    if min_forced and slot in self._takes_forced and len(following := progress.forced()) >= min_forced:
                        forced[slot] = following
        return forced

    def follow(self, slot: int, tokens: Sequence[int]) -> None:
        """Advance a slot by forced tokens, which no step drew."""
        if slot in self.grammars:
            for token in tokens:
                self.grammars[slot].consume(token)

    def errors(self, slots: NDArray[np.int64], flags: NDArray[np.int32]) -> dict[int, str]:
        """Return slot -> why its token is meaningless, from the `flags` of `sampling.sample`, which are 0 for good
        rows."""
        found = {}
        for row in np.flatnonzero(flags).tolist():
            slot = int(slots[row])
            # Without a grammar or bans, the model's own logits left no token.
            banned = flags[row] == sampling.NOTHING_LEFT and self.edits[slot]
            found[slot] = _ALL_BANNED if banned else NOT_FINITE
        for slot, progress in self.grammars.items():
            if progress.error is not None and slot in slots:
                found[slot] = _DEAD_END
        if self.faults:
            found |= {slot: self.faults[slot] for slot in slots.tolist() if slot in self.faults}
        return found


def _bits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return [ceil(vocab_size / 32)] words with the bits of these tokens set, lowest bit first."""
    chosen = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    chosen[list(token_ids)] = True
    return np.packbits(chosen, bitorder="little").view("<i4").astype(np.int32)


def _fault(params: SamplingParams, vocab_size: int) -> str | None:
    """Return why these parameters cannot be met, or None. Ids out of range would reach into other rows or fail the
    step."""
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "stop_token_ids": list(params.stop_token_ids),
        "bad_words": [token for word in params.bad_words for token in word],
        "allowed_token_ids": list(params.allowed_token_ids),
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{name} holds token id {token}, but the model's ids go from 0 to {vocab_size - 1}. Remove it."
    return None
