"""TextThreads: renders and encodes long texts in threads, so that the event loop stays free. Owners take turns."""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from asyncllm.errors import EngineClosed, EngineError, QueueFull
from asyncllm.event_loop.in_thread import starting_thread

__all__ = ["TextThreads"]

Result = TypeVar("Result")

NUM_THREADS = 2
TRIM_FROM = 2**20
"""Texts of at least this many characters take tens of megabytes to encode, which the C library would keep."""


class _Job:
    """A call that waits for a thread or runs in one."""

    __slots__ = ("call", "done", "size")

    def __init__(self, call: Callable[[], Any], size: int, done: asyncio.Future[Any]) -> None:
        self.call: Callable[[], Any] | None = call
        """None once the caller has left, so that the call's arguments are not kept until its turn."""
        self.size = size
        self.done = done


class TextThreads:
    """Two threads. Owners take turns, one text each, so that an owner of many long texts delays no other. Used in one
    event loop."""

    def __init__(self, max_waiting: int = 0) -> None:
        """`max_waiting`: maximum number of characters that wait for a thread; 0: no limit."""
        self._max_waiting = max_waiting
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._waiting: OrderedDict[Hashable, deque[_Job]] = OrderedDict()
        """Owner -> waiting calls; the next owner comes first."""
        self._num_waiting = 0
        """Characters of all waiting calls."""
        self._running: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """End the threads, which finish their current calls. Waiting calls raise EngineClosed. Idempotent."""
        self._closed = True
        for lane in self._waiting.values():
            for job in lane:
                if not job.done.done():
                    job.done.set_exception(_closed())
        self._waiting.clear()
        if self._pool is None:
            return
        self._pool.shutdown(wait=False)
        if self._running:
            await asyncio.wait(self._running)
        # Idle threads end within microseconds, but a join would block the event loop.
        while any(thread.is_alive() for thread in self._pool._threads):  # noqa: ASYNC110 - as in StepThread
            await asyncio.sleep(0)

    async def run(self, call: Callable[[], Result], size: int, owner: Hashable) -> Result:
        """Return the result of `call`, run in a thread at the owner's turn. `size`: characters that it handles. Calls
        of requests that are already in the engine have the owner None. Raises the errors of `call`, EngineClosed, and
        QueueFull for other owners when too much waits."""
        if self._closed:
            raise _closed()
        if (
            owner is not None
            and self._max_waiting
            and self._num_waiting
            and self._num_waiting + size > self._max_waiting
        ):
            raise QueueFull(
                f"The prompts that wait to be encoded have {self._num_waiting} characters, and this one brings {size}; "
                f"at most {self._max_waiting} may wait. Try again in 1 s.",
                1.0,
            )
        job = _Job(call, size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(job)
        self._num_waiting += size
        self._start()
        try:
            result: Result = await job.done
            return result
        finally:
            job.call = None
            del job, call  # An error refers to this frame, and the future refers to the error.

    def _start(self) -> None:
        """Give work to free threads."""
        while len(self._running) < NUM_THREADS and self._waiting:
            owner, lane = next(iter(self._waiting.items()))
            job = lane.popleft()
            self._waiting.move_to_end(owner)
            if not lane:
                del self._waiting[owner]
            self._num_waiting -= job.size
            if job.call is None:
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="asyncllm-encode")
            try:
                with starting_thread():
                    running = asyncio.get_running_loop().run_in_executor(self._pool, _call_and_trim, job.call, job.size)
            except EngineError as error:
                job.done.set_exception(error)
                continue
            self._running.add(running)
            running.add_done_callback(partial(self._finish, job.done))

    def _finish(self, done: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        error = None if running.cancelled() else running.exception()
        if not done.done():
            if running.cancelled():
                done.cancel()
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(running.result())
        self._start()


def _closed() -> EngineClosed:
    return EngineClosed("The engine was closed while the prompt was being prepared.")


def _call_and_trim(call: Callable[[], Result], size: int) -> Result:
    try:
        return call()
    finally:
        del call
        if size >= TRIM_FROM:
            _trim_heap()


def _trim_heap() -> None:
    """Let the C library return unused memory to the system, if possible."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
