"""HostAdapters: which of the loaded LoRA adapters are in host memory. Adapters are read from their folders while steps
run.

    loaded ──> read ──> in host memory ──> some in slots of the device (`AdapterSlots`)
      ^                      │
      └──────────────────────┘ evicted when no request uses it and another adapter needs its place

An adapter is in use while a request is open, or waits for the adapter before it is queued. Every scheduled sequence
thus has its adapter in host memory, and no step waits for a file.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.errors import AsyncLLMError, DeadlineExceeded
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import Executor, LoadAdapter

__all__ = ["HostAdapters"]


class HostAdapters:
    """Written in the event loop's thread."""

    def __init__(self, executor: Executor, room: int, when_read: Callable[[Callable[[], None]], None]) -> None:
        """`room`: how many adapters host memory holds. `when_read` calls a function once all steps in flight have been
        read."""
        self._executor = executor
        self._room = room
        self._when_read = when_read
        self._event_loop = asyncio.get_running_loop()
        self._present: OrderedDict[Adapter, None] = OrderedDict()
        """Adapters in host memory, least recently used first."""
        self._reading: dict[Adapter, asyncio.Task[None]] = {}
        self._num_leaving = 0
        """Evicted adapters that steps in flight may still name. Their memory is freed after those steps."""
        self._turn = asyncio.Lock()
        """Held while one call frees memory and reads: files are read one after another, in the order of the calls."""
        self._freed: asyncio.Future[None] = self._event_loop.create_future()
        """Done when memory may have been freed, and replaced at that time."""
        self._over: asyncio.Future[None] = self._event_loop.create_future()
        """Raises the engine's last error once the engine has ended."""
        self.num_reads = 0
        """Adapters read while the engine was running."""

    def begin_with(self, adapters: Iterable[Adapter]) -> None:
        """Record the adapters that the executor has read at its start."""
        self._present.update(dict.fromkeys(adapters))

    @property
    def num_present(self) -> int:
        """Number of adapters in host memory."""
        return len(self._present)

    async def load(self, adapter: Adapter) -> None:
        """Read an adapter for the first time. Raises ModelError, InvalidParameter, EngineError. A cancellation leaves
        nothing behind."""
        try:
            await self._ensure_read(adapter)
        except BaseException:
            self.forget(adapter)
            raise

    @asynccontextmanager
    async def holding(self, adapter: Adapter, deadline: float | None) -> AsyncGenerator[None, None]:
        """Bring an adapter into host memory and keep it there during the block. `deadline`: in the event loop's time.

        Raises DeadlineExceeded, EngineError, and ModelError if the adapter can no longer be read.
        """
        adapter.num_waiting += 1
        try:
            while adapter not in self._present:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._ensure_read(adapter)
                except TimeoutError:
                    raise DeadlineExceeded(
                        "The request's timeout passed before its adapter had been read or had found space in host "
                        "memory. Allow more time, or raise lora_host_mb."
                    ) from None
            self._present.move_to_end(adapter)
            yield
        finally:
            adapter.num_waiting -= 1
            self.released(adapter)

    def released(self, adapter: Adapter) -> None:
        """Note the end of one use of an adapter."""
        if not adapter.in_use:
            if adapter.retired:
                self.forget(adapter)
            self._note_room()

    def forget(self, adapter: Adapter) -> None:
        """Free the memory of an unloaded adapter once no request uses it."""
        adapter.retired = True
        if adapter in self._present and not adapter.in_use:
            self._drop(adapter)

    def end(self, error: AsyncLLMError) -> None:
        """Raise `error` in the waiting calls. The engine has ended."""
        if not self._over.done():
            self._over.set_exception(error)
            self._over.exception()  # There may be no caller to retrieve it.

    async def _ensure_read(self, adapter: Adapter) -> None:
        """Wait until an adapter has been read, by one task for all callers that need it."""
        reading = self._reading.get(adapter)
        if reading is None:
            reading = self._event_loop.create_task(self._read(adapter), name="asyncllm-adapter")
            self._reading[adapter] = reading
            reading.add_done_callback(partial(self._note_read, adapter))
        await asyncio.shield(reading)

    def _note_read(self, adapter: Adapter, reading: asyncio.Task[None]) -> None:
        del self._reading[adapter]
        retrieve(reading)  # The callers may have left.
        if adapter.retired:
            self.forget(adapter)
        self._note_room()

    async def _read(self, adapter: Adapter) -> None:
        async with self._turn:
            while len(self._present) + self._num_leaving >= self._room:
                freed = self._freed
                self._evict()
                await self._or_end(freed)
            known = LoadAdapter(adapter.number, adapter.name, adapter.path, adapter.digest)
            adapter.digest = await self._or_end(self._executor.load_adapter(known))
            self._present[adapter] = None
            self.num_reads += 1

    async def _or_end(self, future: asyncio.Future[Any]) -> Any:
        """Return the result of a future, or raise the engine's last error, whichever comes first."""
        await asyncio.wait([future, self._over], return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            future.add_done_callback(retrieve)
            self._over.result()
        return future.result()

    def _evict(self) -> None:
        """Begin to free the memory of the unused adapter that was used least recently, if there is one."""
        if not self._num_leaving:
            victim = next((adapter for adapter in self._present if not adapter.in_use), None)
            if victim is not None:
                self._drop(victim)

    def _drop(self, adapter: Adapter) -> None:
        del self._present[adapter]
        self._num_leaving += 1
        self._when_read(partial(self._dropped, adapter))

    def _dropped(self, adapter: Adapter) -> None:
        self._executor.drop_adapter(adapter.number)
        self._num_leaving -= 1
        self._note_room()

    def _note_room(self) -> None:
        if not self._freed.done():
            self._freed.set_result(None)
        self._freed = self._event_loop.create_future()
