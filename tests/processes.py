"""`asyncllm serve` as a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ROOT", "USUAL_SIGNALS", "ServerProcess", "children_seconds", "free_port"]

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def children_seconds() -> Iterator[list[float]]:
    """Yields a list that gets, on leaving, the seconds of a processor that children which ended meanwhile took.

    Unlike the time on the wall, they say the same on a machine that is busy with other things.
    """
    taken: list[float] = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield taken
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


USUAL_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs Python with these arguments. Signals do there what they do in a terminal, also if the tests run in the
background or under nohup, where they are ignored."""


class ServerProcess:
    """Started on entering, in a process group of its own; killed on leaving if it is still there."""

    def __init__(self, *arguments: str, program: tuple[str, ...] = ("asyncllm", "serve")) -> None:
        """`program`: the module to run, and its first arguments."""
        self._arguments = (*program, *arguments)
        self.url = ""
        """Set by `ready`; without a slash at the end."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USUAL_SIGNALS, "-m", *self._arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def ready(self) -> Self:
        """Wait until it serves."""
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r" at (https?://\S+)/v1", line):
                self.url = found[1]
                return self
        raise AssertionError(f"The server did not start:\n{said}")

    def wait_for_socket(self, port: int) -> None:
        """Wait until it listens, which is before its model is loaded."""
        while self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.01)

    def end(self, number: int | None = None, within: float = 20) -> tuple[int, str]:
        """The exit status, and what it wrote to standard error since `ready`, or most of it; `number`: a signal."""
        if number is not None:
            self.process.send_signal(number)
        _, written = self.process.communicate(timeout=within)
        return self.process.returncode, written

    def left_over(self) -> bool:
        """Whether any process of its group is still there."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True
