"""Run a call that would block the event loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_thread"]

Result = TypeVar("Result")


async def in_thread(call: Callable[[], Result]) -> Result:
    """Return the result of `call`, run in a thread of its own.

    For work of milliseconds to seconds: reading, importing, starting processes. Unlike the loop's thread pool, it
    leaves no idle thread behind, and the loop does not wait for it when this task is cancelled.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-open")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call)
    finally:
        thread.shutdown(wait=False)
