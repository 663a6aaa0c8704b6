"""OwnerProcess: the process that started an engine, which a forked one cannot use."""

from __future__ import annotations

import os

from asyncllm.errors import EngineError

__all__ = ["OwnerProcess"]


class OwnerProcess:
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
