"""Waiting for an engine to come to a state, in tests that drive one from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncllm.engine.async_engine import AsyncEngine

__all__ = ["at_once", "settle", "until"]


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until the condition holds; a test's time limit ends what never does."""
    while not condition():  # noqa: ASYNC110 - an engine's counts have no event
        await asyncio.sleep(0.001)


async def settle(engine: AsyncEngine) -> None:
    """Wait until the steps in flight have been read; nothing is held then, and every request has ended once."""
    await until(lambda: not engine.stats().steps_in_flight)
    engine.check_idle()
    stats = engine.stats()
    assert stats.blocks_held == 0
    assert (stats.queued_requests, stats.queued_tokens) == (0, 0)
    ended = stats.requests_finished + stats.requests_cancelled + stats.requests_failed + stats.requests_expired
    assert stats.requests_started == ended


async def at_once(given: Any, *_: Any) -> Any:
    """Return what is given: an await that has nothing to wait for."""
    return given
