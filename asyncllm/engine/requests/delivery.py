"""The way from tokens to a reader: an Answer turns tokens into text, a Delivery hands chunks over.

Delivery never blocks: the engine loop appends a chunk and wakes at most one waiter. Chunks of a slow reader are merged
into one, so that they get longer but not more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncllm.errors import detached, unraised
from asyncllm.protocol import TokenLogprobs
from asyncllm.text.detokenizer import Detokenizer, StopMatcher, StopWords
from asyncllm.types import Chunk, Logprobs, Response

__all__ = ["Answer", "Delivery"]


class Answer:
    """The text of one choice: detokenizes, looks for stop words, and keeps what has not been sent yet."""

    __slots__ = (
        "_detokenizer",
        "_hidden_ids",
        "_matcher",
        "_parts",
        "_unsent",
        "_unsent_logprobs",
        "num_read",
        "num_sent",
        "stop_reason",
    )
    splits = False
    """Whether reasoning and calls are split off its text."""

    def __init__(
        self, detokenizer: Detokenizer, *, stop_words: StopWords | None, hidden_ids: frozenset[int], include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_words, include=include_stop) if stop_words else None
        self._hidden_ids = hidden_ids
        """Tokens that end the answer without being part of its text."""
        self._parts: list[str] = []
        self._unsent = ""
        self._unsent_logprobs: Logprobs | None = None
        self.num_read = 0
        """Tokens turned into text."""
        self.num_sent = 0
        """Tokens that a chunk has carried."""
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    @property
    def watches_text(self) -> bool:
        """Whether every token must be read at once, because its text may end the answer."""
        return self._matcher is not None

    @property
    def over(self) -> bool:
        """Whether the text read so far ends the answer."""
        return self.stop_reason is not None

    @property
    def called(self) -> bool:
        """Whether it holds a complete tool call."""
        return False

    def complete(self, chunk: Chunk) -> None:
        """Move what no chunk has carried yet to `chunk`."""
        chunk.text, self._unsent = self._unsent, ""
        if self._unsent_logprobs is not None:
            chunk.logprobs, self._unsent_logprobs = self._unsent_logprobs, None

    def fill(self, response: Response) -> None:
        """Set the text of a response, with reasoning and tool calls."""
        response.text = self.text

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Turn new tokens into text. With the `last` ones, no text is held back. May set `stop_reason`: then those of
        several forced tokens that come after the end of the answer are left."""
        if self._matcher is not None and len(tokens) > 1:
            for token in tokens[:-1]:
                self.read([token], last=False)
                if self.stop_reason is not None:
                    return
            tokens = tokens[-1:]
        self.num_read += len(tokens)
        if last and tokens and tokens[-1] in self._hidden_ids:
            tokens = tokens[:-1]
        text = self._detokenizer.push(tokens)
        if last:
            text += self._detokenizer.flush()
        if self._matcher is not None:
            text, hit = self._matcher.push(text)
            if hit is not None:
                self.stop_reason = hit
            elif last:
                text += self._matcher.flush()
        if text:
            self._parts.append(text)
            self._unsent += text

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the newest token."""
        if self._unsent_logprobs is None:
            self._unsent_logprobs = []
        self._unsent_logprobs.append(dict(entry))


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
        "streaming",
        "taker",
    )

    def __init__(self, *, streaming: bool) -> None:
        self.streaming = streaming
        """Whether the reader wants chunks as they come. Else it is woken once, at the end."""
        self.listener: Callable[[], None] | None = None
        """Called whenever the waiter would be woken, for readers of several answers."""
        self.taker: Callable[[Chunk], bool] | None = None
        """Offered a chunk of a streamed answer when none waits here. Returns whether it took it. Raises nothing."""
        self.abandoned = False
        """Whether the reader has left. Written by the reader."""
        self.on_end: Callable[[], None] | None = None
        """Called at the end, before the reader learns of it. Written by the session that the answer belongs to."""
        self._chunks: list[Chunk] = []
        self._waiter: asyncio.Future[None] | None = None
        """Wakes the coroutine that takes chunks, while it waits."""
        self._end: asyncio.Event | None = None
        """Set at the end. Made by the first coroutine that waits for it."""
        self._error: BaseException | None = None
        self.ended = False

    def put(self, chunk: Chunk) -> bool:
        """Add a chunk, or merge it into one of the same choice that the reader has not taken.

        Return whether the reader was woken, and so runs in the event loop's next iteration.
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
        return self.streaming and (self._waiter is not None or self.listener is not None) and self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the delivery, with an error for the reader if given. Idempotent. An error in `on_end` goes to the reader
        too."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            try:
                on_end()
            except Exception as failure:
                self._error = self._error or detached(failure)
        if self._end is not None:
            self._end.set()
        self._wake()
        self.listener = self.taker = None

    def take(self) -> Chunk | None:
        """Return the next chunk, or None if there is none yet. Raises the error after the last chunk."""
        if self._chunks and (self.streaming or self.ended):
            return self._chunks.pop(0)
        if self._error is not None:
            raise self._told()
        return None

    def _told(self) -> BaseException:
        """Return the error, to be raised. Keep a copy for later calls, as a raised error refers to its reader."""
        assert self._error is not None
        error, self._error = self._error, unraised(self._error, cause=True)
        return error

    async def wait(self) -> None:
        """Wait for a chunk or the end. Raises RuntimeError if another coroutine waits already."""
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
        woken = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            woken = True
        if self.listener is not None:
            self.listener()
            woken = True
        return woken


def _merge(into: Chunk, chunk: Chunk) -> None:
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
