"""TokenHistory: the tokens of sequences that need them, as counts for penalties and as last tokens for bad words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.device.streams import upload
from asyncllm.protocol import SlotStart

__all__ = ["TokenHistory"]

_NO_ROW = -1
_FIRST_ROWS = 4


class TokenHistory:
    """Histories by slot, only for slots whose parameters need one.

    Counts are in tables [rows, V] on the device, of which a slot borrows a row. The tables begin with a few rows and
    double, because a row takes 5 bytes per token of the vocabulary and few sequences need one.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._row = np.full(num_slots, _NO_ROW, np.int64)
        self._free_rows: list[int] = []
        self._true = torch.ones((), dtype=torch.bool, device=device)
        """Assigning Python's True to indexed entries would wait for the device."""
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._tails: dict[int, list[int]] = {}

    def clear(self, slot: int) -> None:
        """Forget the slot's history and return its row."""
        row = int(self._row[slot])
        if row != _NO_ROW:
            self._free_rows.append(row)
            self._row[slot] = _NO_ROW
        self._bad_words.pop(slot, None)
        self._tails.pop(slot, None)

    def start(self, start: SlotStart, *, counted: bool) -> None:
        """Start the history of a slot's new owner with its known tokens. `counted`: counts are needed."""
        self.clear(start.slot)
        words = start.params.bad_words
        if words:
            self._bad_words[start.slot] = words
            self._tails[start.slot] = start.token_ids[-max(map(len, words)) :]
        if counted:
            row = self._borrow_row()
            self._row[start.slot] = row
            known = upload(np.array(start.token_ids, np.int64), self._device)
            answer = known[start.num_prompt :]
            self._seen[row] = False
            self._seen[row].index_put_((known,), self._true)
            self._counts[row] = 0
            self._counts[row].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def counts(self, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return, for slots that count: tokens seen in prompt or answer [R, V] bool, and occurrences in the answer [R,
        V] int32."""
        rows = upload(self._row[slots], self._device)
        return self._seen[rows], self._counts[rows]

    def banned(self, slot: int) -> NDArray[np.int64]:
        """Return the token ids that would now complete one of the slot's bad words. A bad word may begin in the
        prompt."""
        tail = self._tails[slot]
        ids = {
            word[-1] for word in self._bad_words[slot] if len(word) == 1 or tuple(tail[-len(word) + 1 :]) == word[:-1]
        }
        return np.fromiter(ids, np.int64, len(ids))

    def count(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Add one token, on the device, to the counts of each of `slots` [R] that counts; -1 stands for none."""
        counting = np.flatnonzero((slots >= 0) & (self._row[slots] != _NO_ROW))
        if len(counting):
            rows = upload(self._row[slots[counting]], self._device)
            drawn = tokens[upload(counting, self._device)]
            self._counts[rows, drawn] += 1
            self._seen.index_put_((rows, drawn), self._true)

    def follow(self, slot: int, tokens: Sequence[int]) -> None:
        """Add forced tokens of a slot without bad words."""
        row = int(self._row[slot])
        if row != _NO_ROW:
            known = upload(np.array(tokens, np.int64), self._device)
            self._seen[row].index_put_((known,), self._true)
            self._counts[row].index_add_(0, known, torch.ones_like(known, dtype=torch.int32))

    def observe(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Append one token to the last tokens of each of `slots` that has bad words."""
        if self._tails:
            for slot, token in zip(slots, tokens, strict=True):
                if slot in self._tails:
                    self._tails[slot] = [*self._tails[slot], token][-max(map(len, self._bad_words[slot])) :]

    def _borrow_row(self) -> int:
        if not self._free_rows:
            size, vocab_size = self._counts.shape
            added = max(size, _FIRST_ROWS)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(added, vocab_size)])
            self._seen = torch.cat([self._seen, self._seen.new_zeros(added, vocab_size)])
            self._free_rows.extend(range(size, size + added))
        return self._free_rows.pop()
