"""A call in a thread of its own, for what would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_thread"]

Result = TypeVar("Result")


async def in_thread(call: Callable[[], Result]) -> Result:
    """Return what `call` returns, run in a thread of its own.

    For what takes from milliseconds to seconds: reading, importing, starting processes. Such a thread leaves none
    behind in the loop's pool, and the loop does not wait for it when this task is cancelled.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-open")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call)
    finally:
        thread.shutdown(wait=False)
