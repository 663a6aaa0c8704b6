"""Check where an engine is used: in the process that started it, in asyncio's event loop."""

from __future__ import annotations

import asyncio
import os

from asyncllm.errors import EngineError

__all__ = ["Process", "asyncio_loop"]


class Process:
    """The process in which this object was created."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether the current process was forked from it, and so has none of its threads."""
        return os.getpid() != self._pid

    def check(self, what: str) -> None:
        """Raise EngineError in a process that was forked from it. `what` was started in the original process."""
        if self.forked:
            raise EngineError(
                f"The {what} was started in process {self._pid}, and this is one that was forked from it, without its "
                f"threads. Start another one here, or let multiprocessing use the method 'spawn'."
            )


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop. Raises EngineError if there is none, or if it belongs to another library."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise EngineError(
            "An engine runs in asyncio's event loop, and none is running here. Start it inside asyncio.run(...); "
            "under trio, in a thread with a loop of its own, or use asyncllm.pipeline."
        ) from None
