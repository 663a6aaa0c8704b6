"""Heartbeat: asks ranks that have work, at intervals, whether they are alive, and notices one that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

__all__ = ["Heartbeat", "Work"]

LISTEN_S = 5.0
"""Seconds between two questions."""
MAX_SILENT = 6
"""Number of silent intervals after which a rank counts as hung. Intervals are counted rather than seconds, because this
process may have been stopped itself."""
MAX_SILENT_AT_START = 24
"""The same while ranks load the model: reading a library from a slow disk blocks the whole process."""

Work = Literal["start", "steps"]
"""What ranks are doing: loading the model, or steps and commands."""


class Heartbeat:
    """Runs a timer while ranks have work. Written by its event loop's thread."""

    def __init__(
        self,
        num_ranks: int,
        *,
        work: Callable[[], Work | None],
        ask: Callable[[], None],
        on_silence: Callable[[int, float], None],
    ) -> None:
        """`work`: the ranks' current work. `ask` asks all of them whether they are alive. `on_silence` is called with
        the rank that counts as hung, and the seconds of its silence; after that nothing more is asked."""
        self._work, self._ask, self._on_silence = work, ask, on_silence
        self._silent = [0] * num_ranks
        """By rank, the number of intervals in which it has been silent."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to ask, until there is no work. Call this whenever there is some."""
        if self._timer is None:
            self._silent = [0] * len(self._silent)
            self._timer = asyncio.get_running_loop().call_later(LISTEN_S, self._beat)

    def heard(self, rank: int) -> None:
        """Note that a rank has sent something."""
        self._silent[rank] = 0

    def stop(self) -> None:
        """Stop asking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._timer = None
        work = self._work()
        if work is None:
            return
        limit = MAX_SILENT_AT_START if work == "start" else MAX_SILENT
        for rank, silent in enumerate(self._silent):
            self._silent[rank] = silent + 1
            if silent >= limit:
                self._on_silence(rank, silent * LISTEN_S)
                return
        self._ask()
        self._timer = asyncio.get_running_loop().call_later(LISTEN_S, self._beat)
