"""GrammarMasks: which tokens held answers may go on with, filled in threads from when their last token is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncllm.agent.cpu_threads import allowed_cores
from asyncllm.protocol import Progress

__all__ = ["GrammarMasks"]

SHARE = 8
"""Rows that one thread fills in a go: with fewer in all, to wake it takes as long as to fill them."""
MAX_THREADS = 4


class _Share(NamedTuple):
    """Rows that one thread fills."""

    progresses: list[Progress]
    words: NDArray[np.int32]

    def fill(self) -> None:
        for progress, row in zip(self.progresses, self.words, strict=True):
            progress.fill(row)


class GrammarMasks:
    """Masks by slot: int32 words of 32 tokens each. Used by one thread, which leaves a `Progress` alone from `begin`
    to `finish` or `take`. Its threads end when nothing refers to it any more."""

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        """`num_threads`: beside the caller's; None: by the cores that there are."""
        self._width = -(-vocab_size // 32)
        self._num_threads = min(allowed_cores() - 1, MAX_THREADS) if num_threads is None else num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._filling: list[tuple[_Share, Future[None]]] = []
        self._rows: dict[int, NDArray[np.int32]] = {}
        """Slot -> its mask, which is there after `finish`."""

    def forget(self, slot: int) -> None:
        """Drop the slot's mask: it is another owner's."""
        self._rows.pop(slot, None)

    def begin(self, progresses: Mapping[int, Progress]) -> None:
        """Have threads fill the masks of slots that have gone on, unless they are few."""
        for slot in progresses:
            self.forget(slot)
        if len(progresses) <= SHARE or self._num_threads < 1:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="asyncllm-masks")
        slots = list(progresses)
        for first in range(0, len(slots), SHARE):
            part = slots[first : first + SHARE]
            share = _Share([progresses[slot] for slot in part], np.zeros((len(part), self._width), np.int32))
            self._rows.update(zip(part, share.words, strict=True))
            self._filling.append((share, self._pool.submit(share.fill)))

    def finish(self) -> None:
        """Return when all that was begun is filled; what no thread has come to is filled here. Raises what a fill
        raised."""
        filling, self._filling = self._filling, []
        try:
            # The threads come from the other end.
            for share, future in reversed(filling):
                if future.cancel():
                    share.fill()
            for _, future in filling:
                if not future.cancelled():
                    future.result()
        except BaseException:
            self._rows.clear()
            raise

    def take(self, slots: Sequence[int], progresses: Mapping[int, Progress]) -> NDArray[np.int32]:
        """Return the masks of `slots` [R, W], filled here if they were not begun. Raises as `finish` does."""
        self.begin({slot: progresses[slot] for slot in slots if slot not in self._rows})
        self.finish()
        words = np.zeros((len(slots), self._width), np.int32)
        for row, slot in zip(words, slots, strict=True):
            ready = self._rows.pop(slot, None)
            if ready is None:
                progresses[slot].fill(row)
            else:
                row[:] = ready
        return words
