"""From tokens to the coroutine that waits for them: an Answer turns tokens into text, a Delivery hands chunks over.

Delivery never blocks: the engine loop appends to a cell and wakes at most one waiter. A reader that falls behind
finds its chunks merged into one, so that a slow reader costs longer chunks and not a longer queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncllm.batch import TokenLogprobs
from asyncllm.text.detokenizer import Detokenizer, StopMatcher
from asyncllm.types import Chunk, Logprobs

__all__ = ["Answer", "Delivery"]


class Answer:
    """The text of one choice: incremental detokenizing, stop words, and what has not been sent yet."""

    __slots__ = (
        "_detokenizer",
        "_hidden_ids",
        "_matcher",
        "_parts",
        "_unsent_logprobs",
        "_unsent_parts",
        "num_read",
        "num_sent",
        "stop_reason",
    )

    def __init__(
        self, detokenizer: Detokenizer, *, stop_words: Sequence[str], hidden_ids: frozenset[int], include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_words, include=include_stop) if stop_words else None
        self._hidden_ids = hidden_ids
        """Tokens that end the answer and are no part of its text."""
        self._parts: list[str] = []
        self._unsent_parts: list[str] = []
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
        """Whether every token must be read at once, because a stop word may end the answer."""
        return self._matcher is not None

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Turn new tokens into text; after the `last` ones nothing is held back. May set `stop_reason`."""
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
            self._unsent_parts.append(text)

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Log-probabilities of the newest token."""
        if self._unsent_logprobs is None:
            self._unsent_logprobs = []
        self._unsent_logprobs.append(dict(entry))

    def take(self) -> tuple[str, Logprobs | None]:
        """Text and log-probabilities that no chunk has carried yet."""
        text, self._unsent_parts = "".join(self._unsent_parts), []
        logprobs, self._unsent_logprobs = self._unsent_logprobs, None
        return text, logprobs


class Delivery:
    """The cell between the engine loop, which puts, and one coroutine, which takes.

    States: open, then ended, with or without an error. Nothing is put after the end.
    """

    __slots__ = (
        "_chunks",
        "_end",
        "_error",
        "_on_end",
        "_waiter",
        "abandoned",
        "ended",
        "listener",
        "streaming",
        "taker",
    )

    def __init__(self, *, streaming: bool, on_end: Callable[[], None] | None = None) -> None:
        self.streaming = streaming
        """False: the reader wants the whole answer and is woken once, at the end."""
        self.listener: Callable[[], None] | None = None
        """Called whenever the waiter would be woken, for readers of several cells."""
        self.taker: Callable[[Chunk], bool] | None = None
        """Offered a chunk of a streamed answer when none waits here; False: it stays here. Raises nothing."""
        self.abandoned = False
        """The reader has left. Written by the reader's side."""
        self._on_end = on_end
        self._chunks: list[Chunk] = []
        self._waiter: asyncio.Future[None] | None = None
        """The one coroutine that takes chunks, while it waits."""
        self._end: asyncio.Event | None = None
        """For all who wait for the end; made by the first of them."""
        self._error: BaseException | None = None
        self.ended = False

    def put(self, chunk: Chunk) -> None:
        """Add a chunk; chunks of the same choice that nobody has taken become one."""
        if self.ended:
            return
        if not self._chunks and self.streaming and self.taker is not None and self.taker(chunk):
            return
        for waiting in self._chunks:
            if waiting.choice == chunk.choice:
                _merge(waiting, chunk)
                break
        else:
            self._chunks.append(chunk)
        if self.streaming:
            self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """The terminal event. Calls after the first change nothing. An error of `on_end` becomes the reader's."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            try:
                on_end()
            except Exception as failure:
                self._error = self._error or failure
        if self._end is not None:
            self._end.set()
        self._wake()

    def take(self) -> Chunk | None:
        """The next chunk, or None if there is none yet. Raises the error once the chunks before it are taken."""
        if self._chunks and (self.streaming or self.ended):
            return self._chunks.pop(0)
        if self._error is not None:
            raise self._error
        return None

    async def wait(self) -> None:
        """Wait for a chunk or for the end."""
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
        """Wait for the terminal event, whatever chunks are there. Any number of coroutines may."""
        if not self.ended:
            if self._end is None:
                self._end = asyncio.Event()
            await self._end.wait()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.listener is not None:
            self.listener()


def _merge(into: Chunk, chunk: Chunk) -> None:
    into.text += chunk.text
    into.token_ids.extend(chunk.token_ids)
    if chunk.logprobs is not None:
        into.logprobs = (into.logprobs or []) + chunk.logprobs
    into.finish_reason = chunk.finish_reason
    into.stop_reason = chunk.stop_reason
    into.generate_token_len = chunk.generate_token_len
