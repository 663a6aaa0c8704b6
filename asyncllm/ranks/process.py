"""RankProcess: the child process of one rank, from its start to its end.

It is a new interpreter with the parent's import path: it does not import `__main__` again, and gets one end of a socket
pair. A pidfd reports its death at once. It watches its parent in the same way, and outlives it by no more than a few
milliseconds.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

__all__ = ["RankProcess", "above_streams", "rank_environment"]

_PROGRAM = "import sys; sys.path[:] = {path!r}; from asyncllm.ranks.rank import main; main({descriptor}, {parent})"

_DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Environment of a rank, unless this process's environment says otherwise. NVLink multicast is off: containers often
forbid it, NCCL then fails at its start, and two ranks gain nothing from it. Overlapping devices are allowed, because
each rank sees a single GPU, which all of them number 0."""


class RankProcess:
    """A started child. `end` is the parent's end of the pair, which a `Channel` takes over."""

    def __init__(self, rank: int, *, num_ranks: int = 1, rendezvous: int | None = None) -> None:
        """Start the process. With several ranks, each sees one GPU, and gets the file descriptor `rendezvous`.

        Takes some milliseconds. Raises OSError if the system cannot start another process.
        """
        self.rank = rank
        self.end, theirs = socket.socketpair()
        try:
            with socket.socket(fileno=above_streams(theirs.detach())) as theirs:
                descriptor = theirs.fileno()
                program = _PROGRAM.format(path=sys.path, descriptor=descriptor, parent=os.getpid())
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    pass_fds=[descriptor] if rendezvous is None else [descriptor, rendezvous],
                    stdin=subprocess.DEVNULL,
                    stdout=_inherited(1),
                    stderr=_inherited(2),
                    env=rank_environment(rank) if num_ranks > 1 else None,
                    process_group=0,  # Ctrl-C is for the parent.
                )
            try:
                self._pidfd = os.pidfd_open(self._process.pid)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
        except BaseException:
            self.end.close()
            raise
        self.pid = self._process.pid
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = asyncio.Event()
        """Set when the process is gone and has been reaped."""

    def watch(self, on_end: Callable[[RankProcess], None]) -> None:
        """Call `on_end` in the running event loop when the process ends."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap, on_end)

    def _reap(self, on_end: Callable[[RankProcess], None]) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._pidfd)
        self._close()
        self.ended.set()
        on_end(self)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def kill_and_wait(self) -> None:
        """End the process when no event loop watches it any more; blocks until it is gone."""
        if not self.ended.is_set():
            self.kill()
            self._close()
            self.ended.set()

    def _close(self) -> None:
        self._process.wait()
        os.close(self._pidfd)

    def describe_end(self) -> str:
        """Return how the process ended."""
        status = self._process.returncode
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"rank {self.rank} (process {self.pid}) {how}"


def above_streams(descriptor: int) -> int:
    """Return the file behind a descriptor under a number that is none of the standard streams of a child, and close the
    old one, which is one of them if this process has closed its own."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _inherited(stream: int) -> int | None:
    """Return None for a standard stream that a child inherits, and DEVNULL for one that this process has closed."""
    try:
        inherited = os.get_inheritable(stream)
    except OSError:
        inherited = False
    return None if inherited else subprocess.DEVNULL


def rank_environment(rank: int) -> dict[str, str]:
    """Return the environment of a rank, with the GPU of its number among those that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = None if visible is None else [device for device in visible.split(",") if device]
    own = str(rank) if devices is None else devices[rank] if rank < len(devices) else ""
    return {**_DEFAULTS, **os.environ, "CUDA_VISIBLE_DEVICES": own}
