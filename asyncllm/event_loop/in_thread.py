"""Threads that the system may refuse to start, and calls in threads of their own, which would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from asyncllm.errors import EngineError

__all__ = ["in_thread", "starting_thread"]

Result = TypeVar("Result")


@contextmanager
def starting_thread() -> Iterator[None]:
    """Raise EngineError if the system refuses the thread that the block starts."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(
            f"The system refuses another thread ({error}). End others, or raise the limit of threads or processes "
            f"(`ulimit -u`, or a container's limit of pids)."
        ) from error


async def in_thread(call: Callable[[], Result]) -> Result:
    """Return the result of `call`, run in a thread of its own.

    For work of milliseconds to seconds: reading, importing, starting processes. Unlike the loop's thread pool, it
    leaves no idle thread behind, and the loop does not wait for it when this task is cancelled. Raises EngineError if
    the system refuses the thread.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-open")
    try:
        with starting_thread():
            result = asyncio.get_running_loop().run_in_executor(thread, call)
        return await result
    finally:
        thread.shutdown(wait=False)
