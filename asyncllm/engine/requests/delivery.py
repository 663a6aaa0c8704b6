"""Delivery passes the chunks of an answer to its reader.

It never blocks: the engine loop appends a chunk and wakes at most one waiter. Chunks for a slow reader are merged into
one, so they grow longer but not more numerous.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncllm.errors import detached, unraised
from asyncllm.types import Chunk

__all__ = ["Delivery"]


class Delivery:
    """Passes chunks from the engine loop, which puts them, to one coroutine, which takes them.

    States: open, then ended, with or without an error. Nothing is put after the end.
    """

    __slots__ = (
        "_chunks",
        "_end",
        "_error",
        "_waiter",
        "abandoned",
        "ended",
        "listener",
        "on_end",
        "stop_asked",
        "streaming",
        "taker",
    )

    def __init__(self, *, streaming: bool) -> None:
        self.streaming = streaming
        """Whether the reader wants chunks as they arrive. Otherwise it is woken once, at the end."""
        self.listener: Callable[[], None] | None = None
        """Called whenever the waiter would be woken, for readers of several answers."""
        self.taker: Callable[[Chunk], bool] | None = None
        """Offered each chunk of a streamed answer if no earlier one waits. Returns whether it took the chunk."""
        self.abandoned = False
        """Whether the reader has left. Written by the reader."""
        self.stop_asked = False
        """Whether to end the answer as soon as its request is queued. Written by its session or the loop."""
        self.on_end: Callable[[], None] | None = None
        """Called at the end, before the reader learns of it. Written by the session that the answer belongs to."""
        self._chunks: list[Chunk] = []
        self._waiter: asyncio.Future[None] | None = None
        """Wakes the coroutine that waits for chunks."""
        self._end: asyncio.Event | None = None
        """Set at the end. Made by the first coroutine that waits for it."""
        self._error: BaseException | None = None
        self.ended = False

    def put(self, chunk: Chunk) -> bool:
        """Add a chunk, or merge it into an untaken one of the same choice.

        Return whether the reader was woken, so that it runs in the event loop's next iteration.
        """
        if self.ended:
            return False
        chunks = self._chunks
        if not chunks:
            if self.streaming and self.taker is not None and self.taker(chunk):
                return False
            chunks.append(chunk)
        else:
            for waiting in chunks:
                if waiting.choice == chunk.choice:
                    _merge(waiting, chunk)
                    break
            else:
                chunks.append(chunk)
        return self.streaming and self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the delivery, with an error for the reader if given. Idempotent. An error in `on_end` or `listener` also
        goes to the reader."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        on_end, self.on_end = self.on_end, None
        for call in (on_end, self._wake):
            try:
                if call is not None:
                    call()
            except Exception as failure:
                self._error = self._error or detached(failure)
        if self._end is not None:
            self._end.set()
        self.listener = self.taker = None

    def take(self) -> Chunk | None:
        """Return the next chunk, or None if there is none yet. Raises the error after the last chunk."""
        if self._chunks and (self.streaming or self.ended):
            return self._chunks.pop(0)
        if self._error is not None:
            raise self._error_to_raise()
        return None

    def _error_to_raise(self) -> BaseException:
        """Return the error to raise, and keep a copy for later calls, because a raised error refers to its reader's
        frames."""
        assert self._error is not None
        error, self._error = self._error, unraised(self._error, cause=True)
        return error

    async def wait(self) -> None:
        """Wait for a chunk or the end. Raises RuntimeError if another coroutine is already waiting."""
        if self.ended or (self.streaming and self._chunks):
            return
        if self._waiter is not None:
            raise RuntimeError("Two coroutines iterate the same answer. Iterate it in one, or call generate() twice.")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def wait_end(self) -> None:
        """Wait for the end, whether or not chunks are left. Any number of coroutines may wait."""
        if not self.ended:
            if self._end is None:
                self._end = asyncio.Event()
            await self._end.wait()

    def _wake(self) -> bool:
        """Wake the waiting coroutine and call the listener. Return whether there was either."""
        woken = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            woken = True
        if self.listener is not None:
            self.listener()
            woken = True
        return woken


def _merge(into: Chunk, chunk: Chunk) -> None:
    """Append `chunk`, the next one of the same choice, to an untaken one."""
    into.text += chunk.text
    if chunk.reasoning_token_len or chunk.tool_calls:
        into.reasoning += chunk.reasoning
        into.reasoning_token_len = chunk.reasoning_token_len
        into.tool_calls.extend(chunk.tool_calls)
    into.token_ids.extend(chunk.token_ids)
    if chunk.logprobs is not None:
        into.logprobs = (into.logprobs or []) + chunk.logprobs
    if chunk.finish_reason is not None:
        into.finish_reason, into.stop_reason = chunk.finish_reason, chunk.stop_reason
    into.generate_token_len = chunk.generate_token_len
