"""Generation: one answer as it streams, held by the coroutine that asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from asyncllm.engine.delivery import Delivery
from asyncllm.engine.sequence import Request
from asyncllm.errors import AsyncLLMError, EngineError, RequestFailed
from asyncllm.types import Chunk, Response

if TYPE_CHECKING:
    from asyncllm.engine.session import Session

__all__ = ["Generation", "Host", "interleave"]


class Host(Protocol):
    """What a Generation needs of its engine."""

    def open(self, request: Request) -> None: ...

    def abandon(self, request: Request) -> None: ...

    def abandon_threadsafe(self, request: Request) -> None: ...


class Generation:
    """An answer as it streams: iterate it for chunks, or await it for the whole Response.

        async for chunk in engine.generate("Hi"):
            print(chunk.text, end="")

        response = await engine.generate("Hi")

    Nothing happens before the first await, which raises whatever is wrong with the input. Leaving it early by
    whatever way ends the request within a step: a cancelled task, a timeout, `aclose()`, the end of an `async with`,
    or the last reference going away, as after `break` in a loop over `engine.generate(...)`. Errors of a running
    request (RequestFailed, EngineDead, EngineClosed) are raised after the chunks that came before them.
    """

    def __init__(
        self, find_host: Callable[[], Host], prepare: Callable[[Delivery], Awaitable[Request]], delivery: Delivery
    ) -> None:
        self._request: Request | None = None
        """Set while the engine may know of it."""
        self._find_host = find_host
        self._prepare = prepare
        self._delivery = delivery
        self._started = False
        self._response: Response | None = None
        """The answer, once it has been awaited."""
        self.session: Session | None = None
        """The conversation that `engine.chat` started for this answer, or was given."""
        self.index = 0
        """Stamped on every chunk: which prompt of a batch this answers."""

    async def start(self) -> None:
        """Validate, encode and queue the request. Raises InvalidRequest, SessionError, EngineError, and no other."""
        if self._started or self._delivery.abandoned:
            return
        self._started = True
        arrived = time.monotonic()
        try:
            self._host = self._find_host()
            request = await self._prepared()
            if self._delivery.abandoned:
                # Closed by another task while the prompt was being encoded.
                self._delivery.end()
                return
            request.times.arrived = arrived
            self._host.open(request)
        except BaseException as error:
            self._delivery.abandoned = True
            self._delivery.end(error if isinstance(error, Exception) else None)
            raise
        self._request = request

    async def _prepared(self) -> Request:
        """The request. What tokenizer and template raise of themselves becomes RequestFailed."""
        try:
            return await self._prepare(self._delivery)
        except AsyncLLMError:
            raise
        except Exception as error:
            raise RequestFailed(
                f"The prompt could not be turned into tokens: {error!r}. The other requests go on."
            ) from error

    def poll(self) -> Chunk | None:
        """A chunk if one is there. Raises the request's error once the chunks before it are taken."""
        chunk = self._delivery.take()
        if chunk is not None:
            chunk.index = self.index
        return chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if not self._started:
            await self.start()
        try:
            while True:
                chunk = self.poll()
                if chunk is not None:
                    return chunk
                if self._delivery.ended or self._delivery.abandoned:
                    raise StopAsyncIteration
                await self._delivery.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def response(self) -> Response:
        """The whole answer, or what an iteration has left of it. The engine wakes this coroutine once, at the end."""
        if self._response is None:
            if not self._started:
                self._delivery.streaming = False
            self._response = Response.collect([chunk async for chunk in self])
        return self._response

    async def only_chunk(self) -> Chunk:
        """The one chunk of a request that generates nothing. Raises the request's error, which comes after it."""
        (chunk,) = [chunk async for chunk in self]
        return chunk

    def __await__(self) -> Generator[object, None, Response]:
        return self.response().__await__()

    def cancel(self) -> None:
        """Ask the engine to end the request. Returns at once; more calls change nothing."""
        if not self._delivery.abandoned:
            self._delivery.abandoned = True
            if self._request is not None and not self._delivery.ended:
                self._host.abandon(self._request)

    async def aclose(self) -> None:
        """End the request and wait until its row and blocks are on their way back. Idempotent."""
        self.cancel()
        if self._request is not None:
            await self._delivery.wait_end()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model gets it, history included. Raises EngineError before `start`."""
        if self._request is None:
            raise EngineError("The prompt's token ids are known once the generation has started.")
        return self._request.prompt_ids

    @property
    def ended(self) -> bool:
        """Whether the terminal event has come."""
        return self._delivery.ended

    def listen(self, listener: Callable[[], None], taker: Callable[[Chunk], bool] | None = None) -> None:
        """Call `listener`, in the loop, whenever `poll` may have something new. `taker`, which raises nothing, is
        offered chunks as they come, ahead of that, and returns whether it took one: `poll` does not give it then."""
        self._delivery.listener = listener
        self._delivery.taker = taker

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, and in the middle of the scheduler.
        if self._request is not None and not self._delivery.ended and not self._delivery.abandoned:
            self._delivery.abandoned = True
            self._host.abandon_threadsafe(self._request)


async def interleave(generations: Sequence[Generation]) -> AsyncIterator[Chunk]:
    """The chunks of several answers as they come. Closing it early ends them all."""
    news = asyncio.Event()
    try:
        for generation in generations:
            generation.listen(news.set)
            await generation.start()
            await asyncio.sleep(0)  # many prompts do not hold up the loop
        open_ones = list(generations)
        while open_ones:
            news.clear()
            for generation in list(open_ones):
                # A request that failed inside a step has said so in its last chunk; the others go on.
                with contextlib.suppress(RequestFailed):
                    while (chunk := generation.poll()) is not None:
                        yield chunk
                if generation.ended:
                    open_ones.remove(generation)
            if open_ones:
                await news.wait()
    finally:
        for generation in generations:
            generation.cancel()
