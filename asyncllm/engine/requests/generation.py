"""Generation and Session: a caller's handles for an answer and for a conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self, Unpack

from asyncllm.config import GenerationConfig, RequestKeywords
from asyncllm.engine.lifecycle import Lifecycle
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.requests.input_processor import Call
from asyncllm.engine.schedule.sequence import Request
from asyncllm.engine.sessions.history import Turn
from asyncllm.engine.sessions.session_table import Conversation
from asyncllm.errors import AsyncLLMError, EngineError, RequestFailed, unraised
from asyncllm.types import Chunk, ImagePrompt, Message, Response

__all__ = ["Generation", "Session"]


class Generation(Coroutine[Any, Any, Response]):
    """An answer as it streams: iterate it for chunks, or await it for the whole Response.

        async for chunk in engine.generate("Hi"):
            print(chunk.text, end="")

        response = await engine.generate("Hi")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.generate("Hi"))

    Nothing happens before the first await, which raises InvalidRequest, SessionError or EngineError. Leaving early ends
    the request within a step, whether by a cancelled task, a timeout, `aclose()`, the end of an `async with`, or the
    loss of the last reference, as after a `break` in a loop over `engine.generate(...)`. Errors of a running request
    (RequestFailed, EngineDead, EngineClosed) are raised after the chunks that came before them.
    """

    def __init__(self, engine: Lifecycle, call: Call, *, index: int = 0, session: Session | None = None) -> None:
        self._engine = engine
        self._call = call
        self._delivery = Delivery(streaming=call.streaming)
        self._request: Request | None = None
        """The request once it is queued. Written by `start`."""
        self._started = False
        self._response: Response | None = None
        """The answer, once it has been awaited."""
        self._awaiting: Coroutine[Any, Any, Response] | None = None
        """The coroutine that runs when a task awaits this object as its own."""
        self.session = session
        """The conversation that this answer is a turn of, if `chat` made it."""
        self.index = index
        """Index of the prompt within a batch, as in every chunk."""

    async def start(self) -> None:
        """Validate, encode and queue the request. Raises InvalidRequest, SessionError, EngineError. Idempotent."""
        if self._started or self._delivery.abandoned:
            return
        self._started = True
        arrived = time.monotonic()
        request: Request | None = None
        try:
            self._loop = self._engine.running()
            with self._preparing():
                request = await self._prepared()
                async with self._loop.holding_adapter(request):
                    if self._delivery.abandoned:
                        # Closed by another task while the prompt was being encoded.
                        self._delivery.end()
                        request.drop_sequences()
                        return
                    request.times.arrived = arrived
                    self._loop.open(request)
            if self._delivery.stop_asked:
                self._loop.abandon(request)
        except BaseException as error:
            self._delivery.abandoned = True
            self._delivery.end(unraised(error, cause=False) if isinstance(error, Exception) else None)
            if request is not None:
                request.drop_sequences()
            raise
        self._request = request

    def _preparing(self) -> AbstractContextManager[None]:
        """Return a context in which `stop_session` finds the answer."""
        session_id = self._call.session_id
        return nullcontext() if session_id is None else self._loop.preparing(self._delivery, session_id)

    async def _prepared(self) -> Request:
        """Return the prepared request. Turn errors of tokenizer and template code into RequestFailed."""
        try:
            return await self._engine.inputs.prepare(self._call, self._delivery)
        except AsyncLLMError:
            raise
        except Exception as error:
            raise RequestFailed(
                f"The prompt could not be turned into tokens: {error!r}. The other requests go on."
            ) from error

    def poll(self) -> Chunk | None:
        """Return the next chunk, or None if there is none yet. Raises the request's error after its last chunk."""
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
                self._loop.check_event_loop()
                await self._delivery.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def response(self) -> Response:
        """Return the whole answer, or what an iteration has left of it. Wakes the caller once, at the end."""
        if self._response is None:
            if not self._started:
                self._delivery.streaming = False
            self._response = Response.collect([chunk async for chunk in self])
        return self._response

    async def only_chunk(self) -> Chunk:
        """Return the only chunk of a request that generates no tokens. Raises the request's error."""
        (chunk,) = [chunk async for chunk in self]
        return chunk

    def __await__(self) -> Generator[object, None, Response]:
        return self.response().__await__()

    def send(self, value: Any) -> Any:
        """Resume the task that awaits this as its coroutine."""
        return self._awaited().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where the task that runs this as its coroutine waits."""
        try:
            return self._awaited().throw(*error)
        finally:
            del error  # it refers to this frame by its traceback

    def close(self) -> None:
        """End the request like `cancel`, when the task that runs this as its coroutine ends."""
        if self._awaiting is not None:
            self._awaiting.close()
        self.cancel()

    def _awaited(self) -> Coroutine[Any, Any, Response]:
        if self._awaiting is None:
            self._awaiting = self.response()
        return self._awaiting

    def cancel(self) -> None:
        """Ask the engine to end the request, and return at once. Idempotent."""
        if not self._delivery.abandoned:
            self._delivery.abandoned = True
            if self._request is not None and not self._delivery.ended:
                self._loop.abandon(self._request)

    async def aclose(self) -> None:
        """End the request, and wait until the engine has released its row and blocks. Idempotent."""
        if self._request is not None and not self._delivery.ended:
            self._loop.check_event_loop()
        self.cancel()
        if self._request is not None:
            await self._delivery.wait_end()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt with its history. Raises EngineError before `start`."""
        return self._started_request().prompt_ids

    def _started_request(self) -> Request:
        if self._request is None:
            raise EngineError("The generation has not started, so its prompt is not encoded. Await it first.")
        return self._request

    @property
    def splits(self) -> bool:
        """Whether reasoning and tool calls are split off the text. False before `start`."""
        return self._request is not None and self._request.sequences[0].answer.splits

    @property
    def arrived(self) -> float:
        """Time of the first await, in seconds of `time.monotonic`. Raises EngineError before `start`."""
        return self._started_request().times.arrived

    @property
    def prefilled(self) -> float | None:
        """Time at which the prompt had been computed, or None before that. Raises EngineError before `start`."""
        return self._started_request().times.prefilled

    @property
    def ended(self) -> bool:
        """Whether the request has ended. Chunks may still wait to be read."""
        return self._delivery.ended

    def listen(self, listener: Callable[[], None], taker: Callable[[Chunk], bool] | None = None) -> None:
        """Call `listener` in the event loop whenever `poll` may have something new, until the request has ended.

        `taker` is offered each chunk first, and returns True to keep it from `poll`. An error in either ends this
        request alone, whose reader gets it.
        """
        if not self._delivery.ended:
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
        # The garbage collector may run in any thread, even in the middle of the scheduler.
        if self._request is not None and not self._delivery.ended and not self._delivery.abandoned:
            self._delivery.abandoned = True
            self._loop.abandon_threadsafe(self._request)


class Session:
    """A conversation that keeps its history from call to call. States: idle or in a turn, until closed.

    async with engine.session() as session:
        async for chunk in session.chat("Hi"):
            print(chunk.text, end="")
    """

    def __init__(self, engine: Lifecycle, conversation: Conversation) -> None:
        self._engine = engine
        self._conversation = conversation

    def belongs_to(self, engine: Lifecycle) -> bool:
        """Return whether this is a conversation with this engine."""
        return self._engine is engine

    @property
    def id(self) -> int:
        return self._conversation.id

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the whole conversation so far: prompts, template and answers."""
        return self._conversation.past.token_ids

    @property
    def turns(self) -> list[Turn]:
        return self._conversation.past.turns

    @property
    def history(self) -> list[tuple[object, str]]:
        """(prompt, answer) of each turn."""
        return [(turn.input.prompt, turn.answer) for turn in self.turns]

    @property
    def step(self) -> int:
        """Number of tokens in the history: the position of the next turn's first token."""
        return len(self.token_ids)

    @property
    def response(self) -> Response | None:
        """The answer of the last turn that ended or was stopped; None if there is none."""
        return self._conversation.response

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._conversation.busy

    @property
    def closed(self) -> bool:
        return self._conversation.closed

    def chat(
        self,
        prompt: str | ImagePrompt | Sequence[Message],
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Generation:
        """Return the answer of the next turn, as `AsyncEngine.generate` does. The first await may also raise
        SessionBusy and SessionNotFound."""
        return self.turn(
            prompt=prompt, config=gen_config, do_preprocess=do_preprocess, adapter_name=adapter_name, options=options
        )

    def turn(self, index: int = 0, **fields: Any) -> Generation:
        """Return the answer to a call with these fields as the next turn. `index`: of the prompt within a batch."""
        call = Call(conversation=self._conversation, **fields)
        return Generation(self._engine, call, index=index, session=self)

    def rewind(self, step: int) -> None:
        """Cut the history to its first `step` tokens.

        Raises SessionBusy, SessionNotFound, and InvalidParameter if there are fewer.
        """
        self._conversation.rewind(step)

    def fork(self) -> Session:
        """Return a second conversation with the same history. The two continue independently and share cached blocks.

        Raises SessionBusy, SessionNotFound.
        """
        return Session(self._engine, self._conversation.fork())

    def stop(self) -> None:
        """Stop the running turn, if any. The text generated so far stays in the history."""
        self._conversation.stop()

    def close(self) -> None:
        """Stop the running turn and forget the conversation. Idempotent."""
        self._conversation.close()

    async def __aenter__(self) -> Self:
        self._conversation.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
