"""EngineLoop owns the scheduler, the steps in flight and delivery. It takes a turn whenever something has happened.

    new request ──> _arrived ───┐
    reader left ──> _abandoned ─┤
    time is over ─> _overdue ───┼─> _turn(): update(N) -> schedule() -> submit(N + 2) -> deliver(N) ──> Delivery
    step done ────> _in_flight ─┘

    new weights, sleep ──> Control, while nothing is in flight

Two steps are in flight whenever there is work, or more if steps are short: while the device computes step N + 1, the
loop reads step N, launches N + 2, and only then turns N's tokens into text. A turn is a plain call. The executor makes
it as soon as a step is done; the other three events schedule it for the event loop's next iteration. Nothing polls. A
task waits for the end of the engine, and then ends the open requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from asyncllm.engine.adapters import AdapterTable
from asyncllm.engine.control import Control
from asyncllm.engine.integrity import check_idle
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.backpressure import Backpressure
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request, Sequence
from asyncllm.engine.stats import EngineStats, scheduler_stats
from asyncllm.engine.watchdog import Watchdog
from asyncllm.errors import (
    AsyncLLMError,
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    RequestFailed,
    detached,
)
from asyncllm.event_loop.request_gate import RequestGate
from asyncllm.event_loop.surroundings import Process
from asyncllm.protocol import Command, Executor, StepDropped, StepFailed, StepOutput, UnloadAdapter
from asyncllm.types import FinishReason, RequestRecord

__all__ = ["Death", "EngineLoop"]

logger = logging.getLogger("asyncllm")

PIPELINE_DEPTH = 2
"""Steps in flight: one on the device, one ready to follow it."""

MOST_PUT_OFF = 8
"""Iterations of the event loop that an idle engine waits for the rest of a burst; each lets in 16 prompts."""

STEP_MS_WEIGHT = 0.05
"""Weight of the newest step in the moving average of step times."""


class Death(NamedTuple):
    """Why an engine loop died."""

    cause: BaseException
    lost_device: bool
    """Whether this process can use the device no more, so that a new engine would not help."""


class EngineLoop:
    """States: running, then closed or dead. Its turns write all state but the inboxes, which they empty."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        bounds: Backpressure | None = None,
        *,
        adapters: AdapterTable | None = None,
        gate: RequestGate | None = None,
        stall_timeout: float = 0.0,
        name: str,
    ) -> None:
        """Start in the running event loop. `gate`: the RequestGate that prompts pass on their way here."""
        self.scheduler = scheduler
        self._executor = executor
        self._bounds = bounds if bounds is not None else Backpressure()
        self._state = "running"
        self._cause: BaseException | None = None
        self._open: dict[Request, asyncio.TimerHandle | None] = {}
        """Requests that have not ended -> the timer of their deadline."""
        self._arrived: deque[Request] = deque()
        """Inbox of `open`."""
        self._arrived_tokens = 0
        """Prompt tokens of the requests in that inbox."""
        self._overdue: deque[Request] = deque()
        """Inbox of the timers."""
        self._abandoned: deque[Request] = deque()
        """Inbox of `abandon`."""
        self._in_flight: deque[asyncio.Future[StepOutput]] = deque()
        """Submitted steps, oldest first; the executor resolves them."""
        self._settling = False
        """Whether a step has failed, and steps launched after it are unread. Until they are read, none is launched."""
        self._started = self._finished = self._cancelled = self._failed = self._expired = 0
        self._step_ms = 0.0
        self.observers: list[Callable[[RequestRecord], None]] = []
        """Functions to call with the record of each request that ends. Written by the engine."""
        self._event_loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        """Context of all turns, so that none runs in the context of the request that caused it."""
        self._turn_due = False
        """Whether a turn is scheduled for the event loop's next iteration."""
        self._gate = gate if gate is not None else RequestGate()
        self._put_off = 0
        """How many times in a row a turn was put off."""
        self._in_turn = False
        self._readers_first = False
        """Whether readers have been woken, which run before another step is read."""
        self._ended: asyncio.Future[None] = self._event_loop.create_future()
        """Done when no turn will follow."""
        self._process = Process()
        self.adapters = adapters if adapters is not None else AdapterTable(0, {})
        self._control = Control(executor, scheduler, self._wake, self.adapters)
        self._stall_timeout = stall_timeout
        self._watchdog = Watchdog(self._event_loop, stall_timeout, self._note_stall)
        self._fatal: Exception | None = None
        """The error that the loop is to die of. Written by the callbacks of watchdog and executor."""
        executor.watch(self._step_over, self._note_executor_died)
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
        self._process.check("engine")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._event_loop:
            raise EngineError("The engine runs in another event loop. Call it there, or make one in this loop.")

    async def stop(self) -> None:
        """End open requests with EngineClosed, and wait for the steps in flight and the task."""
        self.check_event_loop()
        if self._state == "running":
            self._state = "closed"
        self._stop_turns()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def wait_ended(self) -> Death | None:
        """Wait until the task has ended. Return why the loop died, or None if it was closed."""
        await asyncio.wait([self._task])
        return None if self._cause is None else Death(self._cause, self._lost_device)

    @property
    def requests(self) -> list[Request]:
        """Requests that have not ended."""
        return list(self._open)

    @property
    def sleep_level(self) -> int:
        """The level of `sleep` (1 or 2) until everything is awake again, then 0."""
        return self._control.sleep_level

    def open(self, request: Request) -> None:
        """Queue a request that `InputProcessor` made. Raises QueueFull, DeadlineExceeded, EngineError."""
        self._check_place(request)
        deadline = request.policy.deadline
        request.times.queued = time.monotonic()
        timer = None if deadline is None else self._event_loop.call_at(deadline, self._time_is_over, request)
        self._open[request] = timer
        if request.adapter is not None:
            request.adapter.num_requests += 1
        self._arrived.append(request)
        self._arrived_tokens += len(request.prompt_ids)
        self._started += 1
        self._watchdog.watch()
        self._wake()

    def _check_place(self, request: Request) -> None:
        """Raise what `open` raises."""
        self.check_running()
        if request.adapter is not None and request.adapter.retired:
            # Unloaded while the prompt was encoded. This raises the error that says so.
            self.adapters.find(request.adapter.name)
        now, deadline = self._event_loop.time(), request.policy.deadline
        if deadline is not None and deadline <= now:
            self._started += 1
            self._expired += 1
            raise DeadlineExceeded("The request's timeout was over when its prompt had been encoded. Allow more time.")
        if self._bounds.bounded and not self._has_own_place(request):
            requests, tokens = self.num_queued()
            self._bounds.check(requests, tokens, len(request.prompt_ids), now)

    def _has_own_place(self, request: Request) -> bool:
        """Return whether the requests that wait of its user fill less than the user's quota of the queue. So a user
        with many requests can fill the rest of the queue, but not the share of other users."""
        user = request.policy.user
        if user is None:
            return False
        arrived = [len(other.prompt_ids) for other in self._arrived if other.policy.user is user]
        requests, tokens = user.queued_requests + len(arrived), user.queued_tokens + sum(arrived)
        return self._bounds.has_place(user.quota / 100, requests, tokens, len(request.prompt_ids))

    def num_queued(self) -> tuple[int, int]:
        """Return how many requests wait for a row, and their tokens, without those that the next turn can admit."""
        waiting = self.scheduler.waiting
        served = 0 if waiting or self._control.hold else min(self.scheduler.num_free_rows, len(self._arrived))
        served_tokens = sum(len(request.prompt_ids) for request in islice(self._arrived, served))
        requests = waiting.num_requests + len(self._arrived) - served
        return requests, waiting.num_tokens + self._arrived_tokens - served_tokens

    async def change(self, command: Command) -> None:
        """Have the executor carry out a command while no step is in flight. Raises EngineError and its errors.

        A cancellation withdraws a command that has not begun; one that has begun is carried out.
        """
        self.check_running()
        await self._control.ask(command)

    def drop(self, adapter: Adapter) -> None:
        """Have the executor free an unloaded adapter, unless an open request uses it. The end of the last one does
        this then."""
        if adapter.retired and not adapter.num_requests and self._state == "running":
            self._control.ask(UnloadAdapter(adapter.number)).add_done_callback(_retrieve)

    def abandon(self, request: Request) -> None:
        """End a request at the next turn: its reader has left."""
        self._abandoned.append(request)
        self._wake()

    def abandon_threadsafe(self, request: Request) -> None:
        """Do as `abandon`, from a finalizer, which may run anywhere."""
        with contextlib.suppress(RuntimeError):
            # Raised by a closed event loop, in which no request is open.
            self._event_loop.call_soon_threadsafe(self.abandon, request)

    def _time_is_over(self, request: Request) -> None:
        self._overdue.append(request)
        self._wake()

    def _note_stall(self) -> None:
        steps, scheduler = len(self._in_flight), self.scheduler
        waits_for = f"{steps} steps in flight, which do not complete" if steps else "a step to be scheduled"
        self._fatal = TimeoutError(
            f"No step has completed for {self._stall_timeout:g} s (stall_timeout), and the loop waits for {waits_for}: "
            f"{scheduler.num_running} sequences run, {scheduler.num_waiting} wait, "
            f"{scheduler.blocks.num_available} of {scheduler.blocks.num_blocks} blocks are available."
        )
        self._wake()

    def _note_executor_died(self, error: Exception) -> None:
        self._fatal = error
        self._wake()

    def _wake(self) -> None:
        """Schedule a turn for the event loop's next iteration."""
        if not self._turn_due:
            self._turn_due = True
            self._event_loop.call_soon(self._take_turn, context=self._context)

    def _take_turn(self) -> None:
        self._turn_due = False
        if self._waits_for_burst():
            self._wake()
        else:
            self._turn()

    def _waits_for_burst(self) -> bool:
        """Return whether an idle engine waits an iteration for prompts that are at the gate. A prompt that misses the
        first step of a burst would wait for the whole of it, and end a step later."""
        waits = self._gate.in_use and not self._in_flight and self._fatal is None and self._put_off < MOST_PUT_OFF
        waits = waits and 0 < len(self._arrived) < self.scheduler.num_free_rows
        self._put_off = self._put_off + 1 if waits else 0
        return waits

    def _step_over(self) -> None:
        """Take a turn, as a step is done. A turn in progress sees the step at its own end."""
        if not self._in_turn:
            self._turn()

    def _readers_ran(self) -> None:
        self._readers_first = False
        if self._in_flight and self._in_flight[0].done():
            self._turn()

    def _turn(self) -> None:
        """Do all work at hand. An error in it is what the engine dies of."""
        if self._state != "running":
            return
        self._in_turn = True
        try:
            self._advance()
        except BaseException as error:
            logger.exception("The engine loop died.")
            # Through its traceback the error would keep the variables of the functions that it passed alive.
            traceback.clear_frames(error.__traceback__)
            self._state, self._cause = "dead", error
            self._stop_turns()
            if not isinstance(error, Exception):
                raise
        finally:
            self._in_turn = False

    def _advance(self) -> None:
        """Empty the inboxes, read a step, launch the next ones, then deliver what was read."""
        if self._fatal is not None:
            self._lost_device = not self._executor.isolated
            raise self._fatal
        self._empty_inboxes()
        advanced: list[Sequence] | None = None
        if self._in_flight and self._in_flight[0].done() and not self._readers_first:
            advanced = self._read_step(self._in_flight.popleft())
        self._control.advance(quiet=not self._in_flight)
        self._launch()
        if advanced is not None:
            if self._deliver(advanced):
                self._readers_first = True
                self._event_loop.call_soon(self._readers_ran, context=self._context)
            if self.scheduler.num_waiting and len(self._in_flight) < self._depth():
                # An answer that ended at a stop word may have made room.
                self._wake()
        if self._in_flight:
            if self._in_flight[0].done() and not self._readers_first:
                self._wake()
            self._watchdog.watch()
        elif self._open and not self._control.hold:
            self._watchdog.watch()
        else:
            self._watchdog.rest()

    def _stop_turns(self) -> None:
        """Take no more turns, and let the task end the open requests."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def _run(self) -> None:
        """The engine's task: wait for the end, then end what is open."""
        try:
            await self._ended
        except asyncio.CancelledError:
            self._state = "closed"
            raise
        finally:
            self._watchdog.rest()
            self._end_all()
            for future in self._in_flight:
                future.add_done_callback(_retrieve)
            if self._in_flight and self._fatal is None:
                await asyncio.wait(self._in_flight)
            self._in_flight.clear()
            self.scheduler.let_go()
            await self._control.end(self._last_words("call"))

    def _end_all(self) -> None:
        """End the open requests."""
        for request in list(self._open):
            self._failed += 1
            self._end(request, self._last_words())
        for inbox in (self._arrived, self._abandoned, self._overdue):
            inbox.clear()

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
        """End the sequences of an open request and send what they have. Return whether it is still open."""
        if request not in self._open:
            return False
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        self.scheduler.cancel(request, reason)
        for sequence in unfinished:
            self._send(sequence)
        return request in self._open

    def _end(self, request: Request, error: AsyncLLMError | None = None) -> None:
        """End an open request: tell its reader and the observers."""
        timer = self._open.pop(request)
        if timer is not None:
            timer.cancel()
        self._bounds.request_ended(self._event_loop.time())
        if request.adapter is not None:
            request.adapter.num_requests -= 1
            self.drop(request.adapter)
        self.scheduler.waiting.deadlines.ended(request, error)
        if self.observers:
            self._observe(request, failed=error is not None)
        request.delivery.end(error)
        request.let_go()

    def _observe(self, request: Request, *, failed: bool) -> None:
        record = request.record("error" if failed else "abort")
        for observer in self.observers:
            try:
                observer(record)
            except Exception:
                logger.exception("An observer of ended requests failed.")

    def _read_step(self, future: asyncio.Future[StepOutput]) -> list[Sequence]:
        """Read a step that is done, and return the sequences that advanced or ended. Raises fatal errors."""
        if future.cancelled():
            raise RuntimeError("the executor cancelled a step")
        # Raising a survivable error here would tie it to this frame, and to all that ends with the step.
        match future.exception():
            case None:
                output = future.result()
            case StepFailed(__cause__=cause):
                self._settling = True
                ended = self.scheduler.step_failed(cause)
                logger.error("A step failed, and %d answers with it; the engine goes on.", len(ended), exc_info=cause)
                return ended
            case StepDropped():
                self.scheduler.step_dropped()
                return []
            case error:
                self._lost_device = not self._executor.isolated
                raise error
        self._watchdog.step_completed()
        self._step_ms += STEP_MS_WEIGHT * (output.elapsed_ms - self._step_ms)
        advanced = self.scheduler.update(output)
        if self.scheduler.prefilled:
            now = time.monotonic()
            for request in self.scheduler.prefilled:
                if request.times.prefilled is None:
                    request.times.prefilled = now
            self.scheduler.prefilled.clear()
        return advanced

    def _launch(self) -> None:
        """Keep the pipeline full. After a failed step it runs empty first, as the steps in it build on that one."""
        if self._settling and self._in_flight:
            return
        self._settling = False
        while not self._control.hold and len(self._in_flight) < self._depth():
            batch = self.scheduler.schedule()
            for request in self.scheduler.admitted:
                if request.times.admitted is None:
                    request.times.admitted = time.monotonic()
            self.scheduler.admitted.clear()
            if batch is None:
                return
            self._in_flight.append(self._executor.submit(batch))

    def _depth(self) -> int:
        """Return how many steps to have in flight: few while a sequence waits, so that it is admitted soon."""
        most = self.scheduler.max_steps_in_flight
        return min(PIPELINE_DEPTH, most) if self.scheduler.num_waiting else most

    def _deliver(self, advanced: list[Sequence]) -> bool:
        """Turn the tokens of a step into text and hand them over. Return whether that has woken readers."""
        woken = False
        for sequence in advanced:
            answer, delivery = sequence.answer, sequence.request.delivery
            if sequence.logprobs is not None:
                answer.add_logprobs(sequence.logprobs)
                sequence.logprobs = None
            if sequence.finish_reason is None and not delivery.streaming and not answer.watches_text:
                continue
            woken |= self._send(sequence)
        # After all chunks, as several answers to one prompt may end in the same step.
        for sequence in advanced:
            if sequence.finish_reason is not None and sequence.request in self._open:
                self._sequence_ended(sequence)
        return woken

    def _send(self, sequence: Sequence) -> bool:
        """Turn a sequence's new tokens into text, and deliver them as a chunk. A failure ends this request alone.

        Return whether its reader was woken.
        """
        try:
            request, answer, token_ids = sequence.request, sequence.answer, sequence.token_ids
            last = sequence.finish_reason is not None
            answer.read_new(token_ids[sequence.num_prompt + answer.num_read :], last=last)
            if answer.stop_reason is not None or (answer.splits and answer.over):
                if sequence.finish_reason in (None, "length"):
                    self.scheduler.finish(sequence, "stop")
                    sequence.finish_reason = "stop"
                    last = True
                self.scheduler.cut(sequence, answer.num_read)
            elif sequence.finish_reason == "stop" and token_ids[-1] in request.named_stop_ids:
                answer.stop_reason = token_ids[-1]
            if sequence.finish_reason == "stop" and answer.called:
                sequence.finish_reason = "tool_calls"
            if not last and not request.delivery.streaming:
                return False
            return request.delivery.put(sequence.take_chunk())
        except Exception as error:
            logger.exception("An answer could not be delivered.")
            if sequence.request in self._open:
                self._fail(sequence.request, f"its answer could not be turned into text: {error!r}", detached(error))
            return False

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
        """Return a snapshot of what the engine holds and has done."""
        queued_requests, queued_tokens = self.num_queued()
        return EngineStats(
            **scheduler_stats(self.scheduler, sum(len(request.sequences) for request in self._arrived)),
            queued_requests=queued_requests,
            queued_tokens=queued_tokens,
            sessions=num_sessions,
            steps_in_flight=len(self._in_flight),
            requests_started=self._started,
            requests_finished=self._finished,
            requests_cancelled=self._cancelled,
            requests_failed=self._failed,
            requests_expired=self._expired,
            requests_refused=self._bounds.num_refused,
            sleep_level=self._control.sleep_level,
            weight_updates=self._control.num_updates,
            seconds_since_progress=self._watchdog.seconds_since_progress,
            step_ms=self._step_ms,
        )

    def check_idle(self) -> None:
        """Raise AssertionError if a request is open, or if a row or block is held. For tests.

        Steps that were launched before the last answer was known to have ended may still run. They hold the blocks
        that they may write until they have been read; `stats()` counts these.
        """
        check_idle(self.scheduler, len(self._open), num_in_flight=len(self._in_flight))


def _retrieve(step: asyncio.Future[StepOutput] | asyncio.Future[None]) -> None:
    """Retrieve an error that no caller awaits, which the event loop would report otherwise."""
    if not step.cancelled():
        step.exception()
