"""OpenRequests: the requests that have not ended, the delivery of their chunks, and their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.backpressure import Backpressure
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request, Sequence
from asyncllm.errors import AsyncLLMError, DeadlineExceeded, RequestFailed, detached
from asyncllm.types import Chunk, FinishReason, RequestRecord

__all__ = ["OpenRequests"]

logger = logging.getLogger("asyncllm")


class OpenRequests:
    """Each request is opened once and ends once: finished, abandoned, expired or failed. Written by `EngineLoop`."""

    def __init__(
        self,
        scheduler: Scheduler,
        bounds: Backpressure,
        observers: list[Callable[[RequestRecord], None]],
        *,
        on_deadline: Callable[[Request], None],
        on_adapter_unused: Callable[[Adapter], None],
    ) -> None:
        """`observers` are called with the record of each request that ends, `on_deadline` when a request's deadline
        passes, `on_adapter_unused` when a request with an adapter has ended."""
        self._event_loop = asyncio.get_running_loop()
        self._scheduler = scheduler
        self._bounds = bounds
        self._observers = observers
        self._on_deadline = on_deadline
        self._on_adapter_unused = on_adapter_unused
        self._timers: dict[Request, asyncio.TimerHandle | None] = {}
        """Open request -> the timer of its deadline."""
        self._preparing: dict[Delivery, int] = {}
        """Answers whose requests are not open yet -> the session_id of their calls. Written by `preparing`."""
        self.num_started = self.num_finished = self.num_cancelled = self.num_failed = self.num_expired = 0

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, request: Request) -> bool:
        return request in self._timers

    def all(self) -> list[Request]:
        """Return the open requests, in the order of their arrival."""
        return list(self._timers)

    @contextmanager
    def preparing(self, delivery: Delivery, session_id: int) -> Iterator[None]:
        """Let `stop_preparing` find an answer during the block, which opens its request."""
        self._preparing[delivery] = session_id
        try:
            yield
        finally:
            del self._preparing[delivery]

    def stop_preparing(self, session_id: int) -> None:
        """Ask the answers of this id whose requests are not open yet to stop."""
        for delivery, label in self._preparing.items():
            if label == session_id:
                delivery.stop_asked = True

    def check_deadline(self, request: Request) -> None:
        """Raise DeadlineExceeded if a new request has already expired, and count it as started and expired."""
        deadline = request.policy.deadline
        if deadline is not None and deadline <= self._event_loop.time():
            self.num_started += 1
            self.num_expired += 1
            raise DeadlineExceeded("The request's timeout was over when its prompt had been encoded. Allow more time.")

    def open(self, request: Request) -> None:
        """Add a new request, and set the timer of its deadline."""
        deadline = request.policy.deadline
        request.times.queued = time.monotonic()
        timer = None if deadline is None else self._event_loop.call_at(deadline, self._on_deadline, request)
        self._timers[request] = timer
        if request.adapter is not None:
            request.adapter.num_requests += 1
        self.num_started += 1

    def abandon(self, request: Request) -> None:
        """End a request whose reader has left, if it is open."""
        if self._cut_short(request, "abort"):
            self.num_cancelled += 1
            self._end(request)

    def expire(self, request: Request) -> None:
        """End a request whose deadline has passed, if it is open."""
        if self._cut_short(request, "error"):
            self.num_expired += 1
            self._end(request, request.deadline_exceeded())

    def end_all(self, error_of: Callable[[], AsyncLLMError]) -> None:
        """End all requests, each with its own error. The engine has ended."""
        for request in self.all():
            self.num_failed += 1
            self._end(request, error_of())

    def deliver(self, advanced: list[Sequence]) -> bool:
        """Turn the tokens of a step into text and deliver them. Return whether readers were woken."""
        woken = False
        for sequence in advanced:
            answer, delivery = sequence.answer, sequence.request.delivery
            if sequence.logprobs is not None:
                answer.add_logprobs(sequence.logprobs)
                sequence.logprobs = None
            if sequence.finish_reason is None and not delivery.streaming and not answer.watches_text:
                continue
            woken |= self._send(sequence)
        # After all chunks, because several answers to one prompt may end in the same step.
        for sequence in advanced:
            if sequence.finish_reason is not None and sequence.request in self._timers:
                self._sequence_ended(sequence)
        return woken

    def _send(self, sequence: Sequence) -> bool:
        """Turn a sequence's new tokens into text, and deliver them as a chunk. A failure ends only this request.

        Return whether its reader was woken.
        """
        try:
            request, answer, token_ids = sequence.request, sequence.answer, sequence.token_ids
            last = sequence.finish_reason is not None
            answer.read(token_ids[sequence.num_prompt + answer.num_read :], last=last)
            if answer.stop_reason is not None or (answer.splits and answer.over):
                if sequence.finish_reason in (None, "length"):
                    self._scheduler.finish(sequence, "stop")
                    sequence.finish_reason = "stop"
                    last = True
                self._scheduler.cut(sequence, answer.num_read)
            elif sequence.finish_reason == "stop" and token_ids[-1] in request.named_stop_ids:
                answer.stop_reason = token_ids[-1]
            if last and sequence.finish_reason == "stop" and answer.called:
                sequence.finish_reason = "tool_calls"
            if not last and not request.delivery.streaming:
                return False
            return request.delivery.put(_unsent(sequence))
        except Exception as error:
            logger.exception("An answer could not be delivered.")
            if sequence.request in self._timers:
                self._fail(sequence.request, f"its answer could not be turned into text: {error!r}", detached(error))
            return False

    def _sequence_ended(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.error is not None:
            self._fail(request, sequence.error, sequence.cause)
        elif request.finished:
            self.num_finished += 1
            self._end(request)

    def _fail(self, request: Request, why: str, cause: BaseException | None = None) -> None:
        """End an open request with RequestFailed."""
        error = RequestFailed(f"The request failed in a step: {why}. The other requests go on.")
        error.__cause__ = cause
        self._scheduler.cancel(request, "error")
        self.num_failed += 1
        self._end(request, error)

    def _cut_short(self, request: Request, reason: FinishReason) -> bool:
        """End the sequences of an open request and send the text so far. Return whether the request is still open."""
        if request not in self._timers:
            return False
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        self._scheduler.cancel(request, reason)
        for sequence in unfinished:
            self._send(sequence)
        return request in self._timers

    def _end(self, request: Request, error: AsyncLLMError | None = None) -> None:
        """End an open request, and tell its reader and the observers."""
        timer = self._timers.pop(request)
        if timer is not None:
            timer.cancel()
        self._bounds.request_ended(self._event_loop.time())
        if request.adapter is not None:
            request.adapter.num_requests -= 1
            self._on_adapter_unused(request.adapter)
        self._scheduler.waiting.deadlines.ended(request, error)
        if self._observers:
            self._observe(request, failed=error is not None)
        request.delivery.end(error)
        request.drop_sequences()

    def _observe(self, request: Request, *, failed: bool) -> None:
        record = request.record("error" if failed else "abort")
        for observer in self._observers:
            try:
                observer(record)
            except (Exception, asyncio.CancelledError):
                logger.exception("An observer of ended requests failed.")


def _unsent(sequence: Sequence) -> Chunk:
    """Return the part of an answer, which has been read up to its newest token, that no chunk has carried yet."""
    request, answer, last = sequence.request, sequence.answer, sequence.finish_reason is not None
    num_generated = len(sequence.token_ids) - sequence.num_prompt
    chunk = Chunk(
        token_ids=sequence.token_ids[sequence.num_prompt + answer.num_sent :],
        finish_reason=sequence.finish_reason,
        stop_reason=answer.stop_reason,
        choice=sequence.index,
        input_token_len=sequence.num_prompt - request.history_len,
        generate_token_len=num_generated,
        history_token_len=request.history_len,
        cached_token_len=request.cached_tokens,
    )
    if request.image_tokens:
        chunk.num_images = sum(not image.given for image in request.images)
        chunk.image_token_len = request.image_tokens
    answer.complete(chunk)
    if sequence.index == 0 and answer.num_sent == 0 and request.prompt_logprobs_asked is not None:
        chunk.prompt_logprobs = [None, *(dict(entry) for entry in request.prompt_logprobs)]
    if last and request.logits:
        chunk.logits = request.logits
    if last:
        chunk.pooled = request.pooled
    answer.num_sent = num_generated
    return chunk
