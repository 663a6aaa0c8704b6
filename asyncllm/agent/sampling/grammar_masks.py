"""GrammarMasks: which tokens grammars allow next, computed on several cores if there are many rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncllm.agent.cpu_threads import allowed_cores
from asyncllm.protocol import Progress

if TYPE_CHECKING:
    from llguidance import LLExecutor

__all__ = ["GrammarMasks"]

FEW_ROWS = 8
"""Number of rows that one thread fills in the time it takes to wake others."""
MAX_THREADS = 8
SLOW_FILL_S = 0.005
"""Maximum seconds of a fill by several threads. After a longer one, the next fill uses one thread, which identifies the
slow rows."""


class GrammarMasks:
    """Masks of int32 words of 32 tokens each. Used by one thread, which releases the interpreter lock while its helpers
    work. They are llguidance's own threads, which never need that lock. Python threads would need it for each row, and
    wait up to 5 ms for it next to a busy event loop."""

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        """`num_threads`: number of helpers; None: depends on the number of cores."""
        self._width = -(-vocab_size // 32)
        self._num_threads = min(allowed_cores(), MAX_THREADS) if num_threads is None else num_threads
        self._helpers: LLExecutor | None = None
        self._was_slow = False

    def compute(self, slots: Sequence[int], progresses: Mapping[int, Progress]) -> NDArray[np.int32]:
        """Return the masks of `slots` [R, W]."""
        words = np.empty((len(slots), self._width), np.int32)
        if len(slots) <= FEW_ROWS or self._num_threads < 2 or self._was_slow:
            self._was_slow = False
            for row, slot in zip(words, slots, strict=True):
                progresses[slot].fill(row)
        else:
            self._fill_together([progresses[slot] for slot in slots], words)
        return words

    def _fill_together(self, progresses: list[Progress], words: NDArray[np.int32]) -> None:
        if self._helpers is None:
            from llguidance import LLExecutor

            self._helpers = LLExecutor(num_threads=self._num_threads)
        matchers = []
        for index, (progress, row) in enumerate(zip(progresses, words, strict=True)):
            matcher = progress.begin_fill(row)
            if matcher is not None:
                matchers.append((matcher, index))
        if not matchers:
            return
        begun = time.perf_counter()
        self._helpers.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))
        self._was_slow = time.perf_counter() - begun > SLOW_FILL_S
        for _, index in matchers:
            progresses[index].finish_fill(words[index])
