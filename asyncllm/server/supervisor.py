"""Supervisor: owns the engine of a server, and replaces it when it dies.

A new engine helps if the engine's own bookkeeping went wrong. It does not help after a fatal device error or a step
that never completes: a CUDA error stays with the process, and memory that a stuck step uses cannot be freed. In these
cases, and after too many deaths, `replacing` raises, and the process should end so that its parent can start another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from asyncllm.config import ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import AsyncLLMError, EngineClosed, EngineDead, EngineError, ModelError
from asyncllm.server.http.errors import ApiError, retry_after

__all__ = ["Supervisor"]

logger = logging.getLogger("asyncllm.server")


class Supervisor:
    """States: serving, restarting, given up. Written by the task of `replacing`."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, make_engine: Callable[[], AsyncEngine] | None = None
    ) -> None:
        """`make_engine` makes an engine like `engine`; None: the program owns the engine, and it is not replaced."""
        self.engine = engine
        """The engine in service, or the last one that was."""
        self.num_restarts = 0
        self.restarting = False
        self._loaded = False
        self._config = config
        self._make_engine = make_engine
        self._deaths: deque[float] = deque()
        """Times of deaths within the last `restart_window`, in seconds of the monotonic clock."""
        self._start_seconds = 1.0
        """Duration of the last start in seconds."""
        self._lost_device = False
        self._replacing: asyncio.Task[None] | None = None
        self.on_replaced: list[Callable[[], None]] = []
        """Functions to call when a new engine serves. Added by parts that hold state of the old one."""

    @property
    def loaded(self) -> bool:
        """Whether the first engine has loaded its model, started here or by the program."""
        if not self._loaded:
            try:
                self.engine.check_running()
            except EngineClosed:
                return False
            except EngineError:
                pass  # It has died since.
            self._loaded = True
        return True

    def check_loaded(self) -> None:
        """Raise ApiError 503 until the first engine has loaded its model."""
        if not self.loaded:
            raise ApiError(
                503, "The model is being loaded. Come back later.", code="model_loading", headers=retry_after(5)
            )

    def check_serving(self) -> None:
        """Raise ApiError 503 while the engine is being replaced."""
        if self.restarting:
            raise ApiError(
                503,
                "The engine has died and is being restarted. Come back later.",
                code="engine_restarting",
                headers=retry_after(self._start_seconds),
            )

    @asynccontextmanager
    async def replacing(self) -> AsyncIterator[asyncio.Event]:
        """Replace the engine whenever it dies, during the block. Yields an event that is set when replacing is given
        up; then the end of the block raises EngineDead."""
        gave_up = asyncio.Event()
        replacing = self._replacing = asyncio.get_running_loop().create_task(
            self._replace_until_given_up(gave_up), name="asyncllm-keep"
        )
        try:
            yield gave_up
        finally:
            replacing.cancel()
            await asyncio.wait([replacing])
            if not replacing.cancelled():
                replacing.result()

    async def _replace_until_given_up(self, gave_up: asyncio.Event) -> None:
        try:
            await self._replace_dead_engines()
        except BaseException:
            gave_up.set()
            raise

    async def _replace_dead_engines(self) -> None:
        while (death := await self.engine.wait_ended()) is not None and self._make_engine is not None:
            self._lost_device = death.lost_device
            self._record_death(death.cause)
            self.restarting = True
            await self._replace(self._make_engine)

    async def _replace(self, make_engine: Callable[[], AsyncEngine]) -> None:
        old = self.engine
        await old.close()
        while True:
            began = time.monotonic()
            engine = make_engine()
            # Observers of the old engine observe the new one too.
            engine.observers = old.observers
            try:
                await engine.start()
                await _take_over_adapters(old, engine)
                break
            except AsyncLLMError as error:
                self._record_death(error)
        self._start_seconds = time.monotonic() - began
        self.engine = engine
        self.num_restarts += 1
        for call in self.on_replaced:
            call()
        self.restarting = False
        logger.error("The engine serves again after %.1f s.", self._start_seconds)

    def _record_death(self, cause: BaseException) -> None:
        """Count a death, and log its `cause`. Raises EngineDead if the engine must not be replaced again."""
        now, window, limit = time.monotonic(), self._config.restart_window, self._config.max_restarts
        self._deaths.append(now)
        while self._deaths[0] <= now - window:
            self._deaths.popleft()
        if self._lost_device:
            why = "The device is lost to this process"
        elif len(self._deaths) > limit:
            why = f"It is death {len(self._deaths)} in {window:g} s, and max_restarts is {limit}"
        else:
            logger.error(
                "The engine died of %r; it is restarted (%d of %d in %g s).",
                cause,
                len(self._deaths),
                limit,
                window,
                exc_info=cause,
            )
            return
        logger.critical("The engine died of %r. %s: the server ends.", cause, why, exc_info=cause)
        raise EngineDead(f"The engine died of {cause!r}. {why}: start the server again.") from cause

    async def close(self) -> None:
        """Close the engine, or stop replacing it. An engine that lost its device is not closed, because that might
        never end."""
        if self._replacing is not None and self.restarting:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        if not self._lost_device:
            await self.engine.close()

    async def __aenter__(self) -> Self:
        """Start the engine. Raises ModelError."""
        began = time.monotonic()
        try:
            await self.engine.start()
        except BaseException:
            await self.engine.close()
            raise
        self._start_seconds = time.monotonic() - began
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def _take_over_adapters(old: AsyncEngine, engine: AsyncEngine) -> None:
    """Load adapters that the old engine had loaded at run time, and unload those it had unloaded."""
    for name in engine.adapters.keys() - old.adapters.keys():
        await engine.unload_adapter(name)
    for name, path in old.adapters.items():
        if engine.adapters.get(name) == path:
            continue
        try:
            await engine.load_adapter(name, path, replace=True)
        except ModelError as error:
            logger.error("The new engine has no adapter %r, which cannot be read any more: %s", name, error)
