"""EngineLoop: the one task that owns scheduler, steps in flight and delivery.

    new request ──> _arrived ───┐
    reader left ──> _abandoned ─┤
    time is over ─> _overdue ───┼─> run(): update(N) -> schedule() -> submit(N + 2) -> deliver(N) ──> Delivery
    step done ────> _in_flight ─┘

    new weights, sleep ──> Changes, while nothing is in flight

Two steps are in flight whenever there is work, or more where they are short: while the device computes step N + 1, the
loop reads step N, launches N + 2, and only then turns N's tokens into text. The task sleeps on one event, which each of
these four sets; nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from asyncllm.batch import Command, Executor, StepDropped, StepFailed, StepOutput
from asyncllm.engine.changes import Changes
from asyncllm.engine.integrity import check_idle
from asyncllm.engine.queue_bounds import QueueBounds
from asyncllm.engine.record import RequestRecord
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.sequence import Request, Sequence
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import AsyncLLMError, DeadlineExceeded, EngineClosed, EngineDead, EngineError, RequestFailed
from asyncllm.types import Chunk, FinishReason

__all__ = ["Death", "EngineLoop"]

logger = logging.getLogger("asyncllm")

PIPELINE_DEPTH = 2
"""Steps in flight: one on the device, one ready to follow it."""

STEP_MS_WEIGHT = 0.05
"""Of the newest step in the moving average of step times."""


class Death(NamedTuple):
    """How an engine loop died."""

    cause: BaseException
    lost_device: bool
    """Whether the device did not survive a step or does not complete one, so that a new engine would not help."""


class EngineLoop:
    """States: running, then closed or dead. Written by the task, except for the inboxes it empties."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        bounds: QueueBounds | None = None,
        *,
        stall_timeout: float = 0.0,
        name: str,
    ) -> None:
        """Start the task in the running event loop."""
        self.scheduler = scheduler
        self._executor = executor
        self._bounds = bounds if bounds is not None else QueueBounds()
        self._state = "running"
        self._cause: BaseException | None = None
        self._open: dict[Request, asyncio.TimerHandle | None] = {}
        """Requests that have not had their terminal event -> the timer of their deadline."""
        self._arrived: deque[Request] = deque()
        """Inbox of `open`."""
        self._arrived_tokens = 0
        """Prompt tokens of the requests in it."""
        self._overdue: deque[Request] = deque()
        """Inbox of the timers."""
        self._abandoned: deque[Request] = deque()
        """Inbox of `abandon`."""
        self._in_flight: deque[asyncio.Future[StepOutput]] = deque()
        """Submitted steps, oldest first; the executor resolves them."""
        self._settling = False
        """A step has failed, and those launched behind it have not all been read: none is launched until then."""
        self._started = self._finished = self._cancelled = self._failed = self._expired = 0
        self._step_ms = 0.0
        self.observers: list[Callable[[RequestRecord], None]] = []
        """Called with every request that ends. Written by the engine."""
        self._wake = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        self._changes = Changes(executor, scheduler, self._wake.set)
        self._stall_timeout = stall_timeout
        self._watchdog = Watchdog(self._event_loop, stall_timeout, self._note_stall)
        self._stalled: TimeoutError | None = None
        """Written by the watchdog: what the task shall die of."""
        self._lost_device = False
        self._task = self._event_loop.create_task(self._run(), name=name)

    def check_running(self) -> None:
        """Raise EngineDead, EngineClosed, or EngineError when called from another event loop."""
        if self._state == "dead":
            raise EngineDead(f"The engine loop died of {self._cause!r}. Make a new engine.") from self._cause
        if self._state != "running":
            raise EngineClosed("The engine is closed. Make a new one.")
        self.check_event_loop()

    def check_event_loop(self) -> None:
        """Raise EngineError when called from anywhere but the event loop that the engine runs in."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._event_loop:
            raise EngineError("The engine runs in another event loop. Call it there, or make one in this loop.")

    async def stop(self) -> None:
        """End open requests with EngineClosed and wait for the steps in flight and the task."""
        self.check_event_loop()
        if self._state == "running":
            self._state = "closed"
        self._wake.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # a KeyboardInterrupt in the task has been raised by the event loop

    async def wait_ended(self) -> Death | None:
        """Wait until the task has ended; None if it was closed."""
        await asyncio.wait([self._task])
        return None if self._cause is None else Death(self._cause, self._lost_device)

    @property
    def requests(self) -> list[Request]:
        """Requests that have not had their terminal event."""
        return list(self._open)

    @property
    def sleep_level(self) -> int:
        """1 or 2 from a sleep until everything is awake again, else 0."""
        return self._changes.sleep_level

    def open(self, request: Request) -> None:
        """Queue a request that `Admission` built. Raises QueueFull, DeadlineExceeded, EngineError."""
        self.check_running()
        now, deadline = self._event_loop.time(), request.terms.deadline
        if deadline is not None and deadline <= now:
            self._started += 1
            self._expired += 1
            raise DeadlineExceeded("The request's timeout was over when its prompt had been encoded. Allow more time.")
        if self._bounds.bounded and not self._has_own_place(request):
            requests, tokens = self.num_queued()
            self._bounds.check(requests, tokens, len(request.prompt_ids), now)
        request.times.queued = time.monotonic()
        timer = None if deadline is None else self._event_loop.call_at(deadline, self._time_is_over, request)
        self._open[request] = timer
        self._arrived.append(request)
        self._arrived_tokens += len(request.prompt_ids)
        self._started += 1
        self._watchdog.watch()
        self._wake.set()

    def _has_own_place(self, request: Request) -> bool:
        """Whether its user has less waiting than its quota's part of the queue: whoever comes too often may fill what
        is left of the queue, but not keep others from their share, nor earlier groups from being first."""
        user = request.terms.user
        if user is None:
            return False
        arrived = [len(other.prompt_ids) for other in self._arrived if other.terms.user is user]
        requests, tokens = user.queued_requests + len(arrived), user.queued_tokens + sum(arrived)
        return self._bounds.has_place(user.quota / 100, requests, tokens, len(request.prompt_ids))

    def num_queued(self) -> tuple[int, int]:
        """Requests that wait for a row, and their tokens; those that find one at the loop's next turn are left out."""
        waiting = self.scheduler.waiting
        served = 0 if waiting or self._changes.hold else min(self.scheduler.num_free_rows, len(self._arrived))
        served_tokens = sum(len(request.prompt_ids) for request in islice(self._arrived, served))
        requests = waiting.num_requests + len(self._arrived) - served
        return requests, waiting.num_tokens + self._arrived_tokens - served_tokens

    async def change(self, command: Command) -> None:
        """Have the executor carry out a command while no step is in flight. Raises what it raises, and EngineError.

        When this is cancelled, a command that is not begun is withdrawn, and one that is begun is carried out.
        """
        self.check_running()
        await self._changes.ask(command)

    def abandon(self, request: Request) -> None:
        """End a request whose reader has left, at the loop's next turn."""
        self._abandoned.append(request)
        self._wake.set()

    def abandon_threadsafe(self, request: Request) -> None:
        """`abandon` from a finalizer, which may run anywhere."""
        with contextlib.suppress(RuntimeError):
            # The loop may be closed, and then nothing is left to end.
            self._event_loop.call_soon_threadsafe(self.abandon, request)

    def _time_is_over(self, request: Request) -> None:
        self._overdue.append(request)
        self._wake.set()

    def _note_stall(self) -> None:
        steps, scheduler = len(self._in_flight), self.scheduler
        waits_for = f"{steps} steps in flight, which do not complete" if steps else "a step to be scheduled"
        self._stalled = TimeoutError(
            f"No step has completed for {self._stall_timeout:g} s (stall_timeout), and the loop waits for {waits_for}: "
            f"{scheduler.num_running} sequences run, {scheduler.num_waiting} wait, "
            f"{scheduler.blocks.num_available} of {scheduler.blocks.num_blocks} blocks are available."
        )
        self._wake.set()

    async def _run(self) -> None:
        """The engine task."""
        try:
            while self._state == "running":
                if self._stalled is not None:
                    self._lost_device = True
                    raise self._stalled
                self._wake.clear()
                self._empty_inboxes()
                advanced = None
                if self._in_flight and self._in_flight[0].done():
                    advanced = self._read_step(self._in_flight.popleft())
                self._changes.advance(quiet=not self._in_flight)
                self._launch()
                if advanced is not None:
                    self._deliver(advanced)
                    # The readers just woken run before the next step is read.
                    await asyncio.sleep(0)
                else:
                    if self._in_flight or (self._open and not self._changes.hold):
                        self._watchdog.watch()
                    else:
                        self._watchdog.rest()
                    await self._wake.wait()
        except asyncio.CancelledError:
            self._state = "closed"
            raise
        except BaseException as error:
            self._state, self._cause = "dead", error
            logger.exception("The engine loop died.")
            if not isinstance(error, Exception):
                raise
        finally:
            self._watchdog.rest()
            for request in list(self._open):
                self._failed += 1
                self._end(request, self._last_words())
            for future in self._in_flight:
                future.add_done_callback(_retrieve)
            if self._in_flight and self._stalled is None:
                await asyncio.wait(self._in_flight)
            self._in_flight.clear()
            await self._changes.end(self._last_words("call"))

    def _last_words(self, what: str = "request") -> AsyncLLMError:
        if self._state == "dead":
            error = EngineDead(f"The engine loop died of {self._cause!r} while this {what} was running.")
            error.__cause__ = self._cause
            return error
        return EngineClosed(f"The engine was closed while this {what} was running.")

    def _empty_inboxes(self) -> None:
        while self._arrived:
            self.scheduler.add(self._arrived.popleft())
        self._arrived_tokens = 0
        while self._abandoned:
            request = self._abandoned.popleft()
            if self._cut_short(request, "abort"):
                self._cancelled += 1
                self._end(request)
        while self._overdue:
            request = self._overdue.popleft()
            if self._cut_short(request, "error"):
                self._expired += 1
                self._end(request, request.deadline_exceeded())

    def _cut_short(self, request: Request, reason: FinishReason) -> bool:
        """End an open request's sequences and send what they have; False if it is not open, or not any more."""
        if request not in self._open:
            return False
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        self.scheduler.cancel(request, reason)
        for sequence in unfinished:
            self._send(sequence)
        return request in self._open

    def _end(self, request: Request, error: AsyncLLMError | None = None) -> None:
        """The terminal event of an open request."""
        timer = self._open.pop(request)
        if timer is not None:
            timer.cancel()
        self._bounds.request_ended(self._event_loop.time())
        self.scheduler.waiting.pace.ended(request, error)
        if self.observers:
            self._observe(request, failed=error is not None)
        request.delivery.end(error)

    def _observe(self, request: Request, *, failed: bool) -> None:
        record = request.record("error" if failed else "abort")
        for observer in self.observers:
            try:
                observer(record)
            except Exception:
                logger.exception("An observer of ended requests failed.")

    def _read_step(self, future: asyncio.Future[StepOutput]) -> list[Sequence]:
        """Take in a completed step, or what a failed one leaves behind. Raises what the device does not survive."""
        if future.cancelled():
            raise RuntimeError("the executor cancelled a step")
        try:
            output = future.result()
        except StepFailed as failure:
            self._settling = True
            ended = self.scheduler.step_failed(failure.__cause__)
            logger.error(
                "A step failed, and %d answers with it; the engine goes on.", len(ended), exc_info=failure.__cause__
            )
            return ended
        except StepDropped:
            self.scheduler.step_dropped()
            return []
        except BaseException:
            self._lost_device = True
            raise
        self._watchdog.step_completed()
        self._step_ms += STEP_MS_WEIGHT * (output.elapsed_ms - self._step_ms)
        advanced = self.scheduler.update(output)
        if self.scheduler.prefilled:
            now = time.monotonic()
            for request in self.scheduler.prefilled:
                if request.times.prefilled is None:
                    request.times.prefilled = now
        return advanced

    def _launch(self) -> None:
        """Keep the pipeline full. After a failed step it runs empty first: what is in it was built on that step."""
        if self._settling and self._in_flight:
            return
        self._settling = False
        while not self._changes.hold and len(self._in_flight) < self._depth():
            batch = self.scheduler.schedule()
            for request in self.scheduler.admitted:
                if request.times.admitted is None:
                    request.times.admitted = time.monotonic()
            if batch is None:
                return
            future = self._executor.submit(batch)
            future.add_done_callback(lambda _: self._wake.set())
            self._in_flight.append(future)

    def _depth(self) -> int:
        """Steps to have in flight. A prompt that waits is admitted between two steps, and not behind many."""
        most = self.scheduler.max_steps_in_flight
        return min(PIPELINE_DEPTH, most) if self.scheduler.num_waiting else most

    def _deliver(self, advanced: list[Sequence]) -> None:
        """Turn the tokens of a step into text and hand them over."""
        for sequence in advanced:
            answer, delivery = sequence.answer, sequence.request.delivery
            if sequence.logprobs is not None:
                answer.add_logprobs(sequence.logprobs)
                sequence.logprobs = None
            if sequence.finish_reason is None and not delivery.streaming and not answer.watches_text:
                continue
            self._send(sequence)
        # Only now, as several answers to one prompt may end in the same step.
        for sequence in advanced:
            if sequence.finish_reason is not None and sequence.request in self._open:
                self._sequence_ended(sequence)

    def _send(self, sequence: Sequence) -> None:
        """Bring a sequence's answer up to date and put what is new into its cell. A failure ends this request alone."""
        try:
            request, answer, token_ids = sequence.request, sequence.answer, sequence.token_ids
            num_prompt, last = sequence.num_prompt, sequence.finish_reason is not None
            answer.read(token_ids[num_prompt + answer.num_read :], last=last)
            if answer.stop_reason is not None:
                if sequence.finish_reason in (None, "length"):
                    self.scheduler.finish(sequence, "stop")
                    sequence.finish_reason = "stop"
                    last = True
            elif sequence.finish_reason == "stop" and token_ids[-1] in request.named_stop_ids:
                answer.stop_reason = token_ids[-1]
            if not last and not request.delivery.streaming:
                return
            text, logprobs = answer.take()
            num_generated = len(token_ids) - num_prompt
            chunk = Chunk(
                text=text,
                token_ids=token_ids[num_prompt + answer.num_sent :],
                logprobs=logprobs,
                finish_reason=sequence.finish_reason,
                stop_reason=answer.stop_reason,
                choice=sequence.index,
                input_token_len=num_prompt - request.history_len,
                generate_token_len=num_generated,
                history_token_len=request.history_len,
                cached_token_len=request.cached_tokens,
            )
            if sequence.index == 0 and answer.num_sent == 0 and request.prompt_logprobs_asked is not None:
                chunk.prompt_logprobs = [None, *(dict(entry) for entry in request.prompt_logprobs)]
            if last and request.logits:
                chunk.logits = request.logits
            if last:
                chunk.pooled = request.pooled
            answer.num_sent = num_generated
            request.delivery.put(chunk)
        except Exception as error:
            logger.exception("An answer could not be delivered.")
            if sequence.request in self._open:
                self._fail(sequence.request, f"its answer could not be turned into text: {error!r}", error)

    def _sequence_ended(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.error is not None:
            self._fail(request, sequence.error, sequence.cause)
        elif request.finished:
            self._finished += 1
            self._end(request)

    def _fail(self, request: Request, why: str, cause: BaseException | None = None) -> None:
        """End an open request with RequestFailed."""
        error = RequestFailed(f"The request failed in a step: {why}. The other requests go on.")
        error.__cause__ = cause
        self.scheduler.cancel(request, "error")
        self._failed += 1
        self._end(request, error)

    def stats(self, num_sessions: int) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        scheduler, blocks, counts = self.scheduler, self.scheduler.blocks, self.scheduler.counts
        host = scheduler.host
        queued_requests, queued_tokens = self.num_queued()
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + sum(len(request.sequences) for request in self._arrived),
            swapped=len(host.swapped),
            queued_requests=queued_requests,
            queued_tokens=queued_tokens,
            sessions=num_sessions,
            steps_in_flight=len(self._in_flight),
            blocks_total=blocks.num_blocks,
            blocks_free=blocks.num_free,
            blocks_cached=blocks.num_idle,
            blocks_held=blocks.num_held,
            host_blocks_total=host.blocks.num_blocks,
            host_blocks_free=host.blocks.num_free,
            host_blocks_cached=host.blocks.num_idle,
            host_blocks_held=host.blocks.num_held,
            blocks_swapped_out=host.num_swapped_out,
            blocks_swapped_in=host.num_swapped_in,
            steps=counts.steps,
            steps_failed=counts.failed_steps,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            prefill_tokens=counts.prefill_tokens,
            decode_tokens=counts.decode_tokens,
            sampled_tokens=counts.sampled_tokens,
            preemptions=counts.preemptions,
            swap_fallbacks=host.num_fallbacks,
            requests_started=self._started,
            requests_finished=self._finished,
            requests_cancelled=self._cancelled,
            requests_failed=self._failed,
            requests_expired=self._expired,
            requests_refused=self._bounds.num_refused,
            user_tokens={} if scheduler.waiting.quality is None else scheduler.waiting.quality.used(),
            sleep_level=self._changes.sleep_level,
            weight_updates=self._changes.num_updates,
            seconds_since_progress=self._watchdog.seconds_since_progress,
            step_ms=self._step_ms,
        )

    def check_idle(self) -> None:
        """Raise AssertionError if a request is open, or a row or block is held; for tests.

        Steps that were launched before it was known that all answers have ended may still run, and the blocks that
        they may write are theirs until they have been read. `stats()` counts them.
        """
        check_idle(self.scheduler, len(self._open), num_in_flight=len(self._in_flight))


def _retrieve(step: asyncio.Future[StepOutput]) -> None:
    """Take notice of a step's error that nobody waits for, or the event loop would report it."""
    if not step.cancelled():
        step.exception()
