"""Checks that a test leaves nothing behind. Used by the autouse fixture in conftest.py, tested by test_leaks.py."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["LeakCheck", "without_leftover_tasks"]

GRACE_S = 2.0
"""How long a thread may take to end, or a cancelled row to give its blocks back, after the test."""

LASTING_FILES = ("/dev/urandom", "/dev/null", "/proc/")
"""Files that libraries open once and keep."""


class LeakCheck:
    """Compares threads, file descriptors, live engines and errors nobody saw, before and after a test."""

    def __init__(self, grace: float = GRACE_S) -> None:
        self.grace = grace

    def begin(self) -> None:
        gc.freeze()  # what exists now need not be searched again after the test: collecting stays cheap
        self._threads = set(threading.enumerate())
        self._files = open_files()
        self.errors: list[str] = []
        self._handler = _ErrorRecords(self.errors)
        logging.getLogger("asyncio").addHandler(self._handler)
        self._unraisablehook = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def end(self) -> None:
        """Raises AssertionError with everything that was left over."""
        try:
            gc.collect()
            deadline = time.monotonic() + self.grace
            while (left := self._left_over()) and time.monotonic() < deadline:
                time.sleep(0.005)
            left += self.errors
        finally:
            logging.getLogger("asyncio").removeHandler(self._handler)
            sys.unraisablehook = self._unraisablehook
        if left:
            raise AssertionError("The test left something over:\n  " + "\n  ".join(left))

    def _left_over(self) -> list[str]:
        left = [f"thread {thread.name!r}" for thread in threading.enumerate() if thread not in self._threads]
        for descriptor, target in sorted(open_files().items() - self._files.items()):
            if not target.startswith(LASTING_FILES):
                left.append(f"file descriptor {descriptor} -> {target}")
        engines = sys.modules.get("asyncllm.engine.lifecycle")
        for engine in list(getattr(engines, "_live", ())):
            try:
                engine.check_idle()
            except AssertionError as error:
                left.append(f"engine not idle: {error}")
        return left

    def _unraisable(self, unraisable: Any) -> None:
        self.errors.append(f"error nobody could catch: {unraisable.exc_value!r} in {unraisable.object!r}")


class _ErrorRecords(logging.Handler):
    """Collects what asyncio's default exception handler logs: exceptions never retrieved, tasks destroyed pending."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(f"asyncio: {record.getMessage()}")


def open_files() -> dict[int, str]:
    """File descriptor -> what it is open on. Empty where there is no /proc."""
    files: dict[int, str] = {}
    if os.path.isdir("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            try:
                files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue  # the descriptor of the listing itself
    return files


def without_leftover_tasks(
    test: Callable[..., Awaitable[Any]], grace: float = GRACE_S
) -> Callable[..., Awaitable[Any]]:
    """The same async test, which also fails if a task that it started still runs when it returns."""

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        gc.collect()
        deadline = time.monotonic() + grace
        while (left := asyncio.all_tasks() - before) and time.monotonic() < deadline:
            await asyncio.wait(left, timeout=0.005)
        assert not left, "The test left tasks over: " + ", ".join(repr(task) for task in left)

    return checked
