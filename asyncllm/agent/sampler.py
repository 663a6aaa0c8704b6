"""The sampler: every sequence's sampling state, addressed by slot, and the draw of a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.logit_edits import edit_logits
from asyncllm.agent.sampling_params import NOT_FINITE, PENALTIES, SlotParams
from asyncllm.agent.token_history import TokenHistory
from asyncllm.agent.upload import upload
from asyncllm.batch import SlotStart, TokenLogprobs
from asyncllm.kernels import sampling

__all__ = ["NOT_FINITE", "Sampled", "Sampler", "list_logprobs"]


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
        self._device = device
        self._params = SlotParams(num_slots, vocab_size)
        self._history = TokenHistory(num_slots, vocab_size, device)

    def start(self, start: SlotStart) -> None:
        """Give the slot to a new sequence; nothing of its former owner remains."""
        self._params.start(start)
        if start.slot in self._params.faults:
            self._history.clear(start.slot)
        else:
            self._history.start(start, counted=bool(self._params.edits[start.slot] & PENALTIES))

    def sample(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Sampled:
        """Draw one token for each of `slots` [R], all distinct, from `logits` [R, V] float32, which stay as they are.

        `positions` [R] are the absolute positions of the tokens to be drawn.
        """
        params = self._params
        maxima, tokens = logits.max(dim=-1)
        usable = np.isfinite(maxima.numpy(force=True))
        if usable.all() and params.plain[slots].all():
            return Sampled(tokens, tokens.tolist(), {}, {})
        flags = np.where(usable, 0, sampling.NOT_FINITE).astype(np.int32)
        edited = (params.edits[slots] != 0) & usable
        drawn = np.flatnonzero(~(params.greedy[slots] | edited) & usable)
        if len(drawn):
            every = len(drawn) == len(slots)
            index = upload(drawn, self._device)
            tokens[index], _ = self._draw(logits if every else logits[index], slots[drawn], positions[drawn])
        if edited.any():
            rows = np.flatnonzero(edited)
            index, owners = upload(rows, self._device), slots[rows]
            processed = logits[index]
            edit_logits(processed, owners, positions[rows], params, self._history)
            tokens[index], found = self._draw(processed, owners, positions[rows])
            flags[rows] = found.numpy(force=True)
        token_list: list[int] = tokens.tolist()
        if edited.any():
            self._history.count(slots, tokens)
            self._history.observe(slots.tolist(), token_list)
        errors = params.errors(slots, flags)
        return Sampled(tokens, token_list, self._logprobs(logits, tokens, slots, errors), errors)

    def _draw(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Tokens and flags, as of `sampling.sample`, for the rows of `logits`, whose owners are `slots`."""
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        flags = torch.empty(len(slots), dtype=torch.int32, device=self._device)
        settings = upload(self._params.settings[slots], self._device)
        sampling.sample(logits, settings, None, upload(positions, self._device), tokens, flags)
        return tokens, flags

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, slots: NDArray[np.int64], errors: dict[int, str]
    ) -> dict[int, TokenLogprobs]:
        asked = self._params.num_logprobs[slots]
        rows = np.flatnonzero(asked >= 0)
        if not len(rows):
            return {}
        index = upload(rows, self._device)
        drawn, num_top = tokens[index], asked[rows].tolist()
        ranked = list_logprobs(drawn.tolist(), *sampling.token_logprobs(logits[index], drawn, max(num_top)), num_top)
        return {slot: entry for slot, entry in zip(slots[rows].tolist(), ranked, strict=True) if slot not in errors}


def list_logprobs(
    tokens: Sequence[int], chosen: Tensor, top: Tensor, ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Per row of what `sampling.token_logprobs` gave for `tokens` [R]: (id, log-probability) of its token, then of the
    `num_top[row]` most likely ones in falling order, among which the former may appear again."""
    return [
        [(token, logprob), *zip(row_ids[:width], row_top[:width], strict=True)]
        for token, logprob, row_ids, row_top, width in zip(
            tokens, chosen.tolist(), ids.tolist(), top.tolist(), num_top, strict=True
        )
    ]
