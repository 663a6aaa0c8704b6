"""Sampler: the sampling state of every sequence, by slot, and the draw of a step's tokens.

The calls of a step are `start` for slots with new owners, `upload`, `draw` (which a CUDA graph may contain), then
`edit_and_redraw` and `logprobs`. None of them waits for the device. When the step's tokens and flags are on the host,
`errors` and `PendingLogprobs.result` return the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.device.streams import upload
from asyncllm.agent.sampling.logit_edits import edit_logits
from asyncllm.agent.sampling.logprobs import PendingLogprobs
from asyncllm.agent.sampling.params import GRAMMAR, LONG_BAD_WORDS, PENALTIES, SlotParams
from asyncllm.agent.sampling.rank_rows import RankRows
from asyncllm.agent.sampling.token_history import TokenHistory
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import sampling
from asyncllm.protocol import PrefillRow, SlotStart

__all__ = ["Sampler"]


class Sampler:
    """Sampling state of `num_slots` slots over a vocabulary of `vocab_size` tokens.

    A slot's draw is a function of its own logits, parameters and history, whatever other slots ask for.

    In all methods, slot -1 marks a row that only pads the batch; the other slots of a batch are distinct.

    In a `group`, logits are those of this rank's rows (`RankRows.whole`), and everything else covers all rows. Only
    `draw_from_lists` takes logits of this rank's tokens.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, *, group: RankGroup | None = None
    ) -> None:
        self._device = device
        self.ranks = None if group is None else RankRows(group, vocab_size)
        """How ranks divide the draw."""
        self._params = SlotParams(num_slots, vocab_size)
        self._history = TokenHistory(num_slots, vocab_size, device)
        self._settings = torch.zeros(num_slots, sampling.NUM_SETTINGS, dtype=torch.int64, device=device)
        self._dirty: set[int] = set()

    def start(self, start: SlotStart) -> None:
        """Assign the slot to a new sequence, and remove everything of its former owner. The device sees it after
        `upload`."""
        self._params.start(start)
        self._dirty.add(start.slot)
        if start.slot in self._params.faults:
            self._history.clear(start.slot)
        else:
            self._history.start(start, counted=bool(self._params.edits[start.slot] & PENALTIES))

    def upload(self) -> None:
        """Copy the settings of slots started since the last call to the device, after all steps launched so far."""
        if self._dirty:
            slots = np.fromiter(self._dirty, np.int64, len(self._dirty))
            rows = upload(np.column_stack([slots, self._params.settings[slots]]), self._device)
            self._settings.index_copy_(0, rows[:, 0], rows[:, 1:])
            self._dirty.clear()

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor, flags: Tensor) -> None:
        """Draw from unedited `logits` [R, V] into `tokens` [R] int64 and `flags` [R] int32, for `slots` [R] int32.

        `positions` [R] int32 or int64 are the positions of the tokens to be drawn. See `sampling.sample`.
        """
        if self.ranks is None:
            sampling.sample(logits, self._settings, slots, positions, tokens, flags)
            return
        own_slots, own_positions = self.ranks.own(slots, -1), self.ranks.own(positions)
        drawn, found = torch.empty_like(own_slots, dtype=torch.int64), torch.empty_like(own_slots, dtype=torch.int32)
        sampling.sample(logits, self._settings, own_slots, own_positions, drawn, found)
        self.ranks.publish(drawn, found, tokens, flags)

    def own_rows(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of this rank's rows, in `out` if given, from the logits of its tokens [R, v]; without
        ranks, return `logits` unchanged."""
        return logits if self.ranks is None else self.ranks.whole(logits, out)

    def takes_lists(self, slots: NDArray[np.int64]) -> bool:
        """Return whether ranks can draw for `slots` without whole rows of logits: no edits or log-probabilities are
        wanted, and short lists contain all tokens that can win."""
        return self.ranks is not None and bool(self._params.listed[slots[slots >= 0]].all())

    def draw_from_lists(self, logits: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor, flags: Tensor) -> None:
        """Draw like `draw`, for slots that `takes_lists`, from `logits` [R, v] of this rank's tokens."""
        assert self.ranks is not None, "without ranks there are no lists"
        self.ranks.draw(logits, self._settings, slots, positions, tokens, flags)

    def largest(self, logits: Tensor, slots: NDArray[np.int64]) -> Tensor | None:
        """Return the tokens [R] int64 that `draw` draws, all with flag 0, if on a CPU all of `slots` take the largest
        logit of their row [R, V] and want no edits or log-probabilities; otherwise None."""
        if logits.is_cuda or self.ranks is not None or not self._params.plain[slots].all():
            return None
        maxima, tokens = logits.max(dim=-1)
        return tokens if np.isfinite(maxima.float().numpy()).all() else None

    def edit_and_redraw(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        device_slots: Tensor,
        device_positions: Tensor,
        tokens: Tensor,
        flags: Tensor,
    ) -> bool:
        """Draw again, into `tokens` and `flags`, for the rows whose logits need edits. Return whether there are any.

        `slots` and `positions` are `device_slots` and `device_positions` on the host. `logits` stay as they are.
        """
        rows = np.flatnonzero((slots >= 0) & (self._params.edits[slots] != 0))
        if not len(rows):
            return False
        own, places = (rows, rows) if self.ranks is None else self.ranks.own_indices(rows, len(slots))
        if len(own):
            index, owners = upload(own, self._device), slots[own]
            found = upload(places, self._device) if self.ranks is not None else index
            processed = logits[found].to(torch.float32)
            edit_logits(processed, owners, positions[own], self._params, self._history)
            redrawn = torch.empty(len(own), dtype=torch.int64, device=self._device)
            failed = torch.empty(len(own), dtype=torch.int32, device=self._device)
            sampling.sample(processed, self._settings, device_slots[index], device_positions[index], redrawn, failed)
            # A row with unusable logits stays failed, even if the edits ban those tokens.
            usable = flags[index] == 0
            tokens[index] = torch.where(usable, redrawn, 0)
            flags[index] = torch.where(usable, failed, sampling.NOT_FINITE)
        if self.ranks is not None:
            self.ranks.publish(self.ranks.own(tokens), self.ranks.own(flags), tokens, flags)
        self._history.count(slots, tokens)
        return True

    def needs_host(self, slots: NDArray[np.int64]) -> bool:
        """Return whether the next `edit_and_redraw` with `slots` needs their last tokens on the host, through
        `observe`."""
        return bool((self._params.edits[slots[slots >= 0]] & (LONG_BAD_WORDS | GRAMMAR)).any())

    def observe(self, slots: Sequence[int], tokens: Sequence[int], min_forced: int = 0) -> dict[int, list[int]]:
        """Record the `tokens` [R] that a step drew for `slots` [R], once per step and in order. Return the tokens
        forced to follow (`StepOutput.forced`), where there are at least `min_forced`; 0: none."""
        self._history.observe(slots, tokens)
        return self._params.observe(slots, tokens, min_forced)

    def follow(self, rows: Sequence[PrefillRow]) -> None:
        """Advance slots by the forced tokens of a step's `rows`. All earlier steps have been observed."""
        for row in rows:
            if row.forced:
                self._history.follow(row.slot, row.forced)
                self._params.follow(row.slot, row.forced)

    def logprobs(self, logits: Tensor, slots: NDArray[np.int64], tokens: Tensor) -> PendingLogprobs | None:
        """Return the log-probabilities of the drawn `tokens` [R] under the model's own `logits` [R, V]; None if no slot
        wants any."""
        num_logprobs = np.where(slots >= 0, self._params.num_logprobs[slots], -1)
        rows = np.flatnonzero(num_logprobs >= 0)
        if not len(rows):
            return None
        num_top = num_logprobs[rows].tolist()
        drawn = tokens[upload(rows, self._device)]
        if self.ranks is None:
            chosen = logits[upload(rows, self._device)].to(torch.float32)
            ranked = sampling.token_logprobs(chosen, drawn, max(num_top))
        else:
            scored = self.ranks.scored(rows, len(slots))
            own = upload(scored.own, self._device)
            known = self.ranks.own(tokens)[own]
            found = sampling.token_logprobs(logits[own].to(torch.float32), known, max(num_top))
            ranked = self.ranks.gather_scores(scored, found)
        return PendingLogprobs(slots[rows].tolist(), num_top, (drawn, *ranked))

    def errors(self, slots: NDArray[np.int64], flags: NDArray[np.int32]) -> dict[int, str]:
        """Return slot -> why its token is meaningless, from the `flags` [R] of a step."""
        return self._params.errors(slots, flags)
