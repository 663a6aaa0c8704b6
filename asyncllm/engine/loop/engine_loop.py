"""EngineLoop runs the engine in turns: each turn schedules steps, reads them, and delivers their tokens.

    new request ──> Inbox ─────────┐
    reader left ──> Inbox ─────────┤
    time is over ─> Inbox ─────────┼─> _turn(): update(N) -> schedule() -> submit(N + 2) -> deliver(N) ──> Delivery
    step done ────> LaunchedSteps ─┘

    new weights, sleep ──> Control, while nothing is in flight

Two steps are in flight whenever there is work, or more if steps are short: while the device computes step N + 1, the
loop reads step N, launches N + 2, and only then turns N's tokens into text. A turn is a plain call. The executor makes
it as soon as a step is done; the other three events schedule it for the event loop's next iteration (`Turns`). Nothing
polls. A task waits for the end of the engine, and then ends the open requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import islice
from typing import NamedTuple

from asyncllm.engine.adapters import AdapterTable
from asyncllm.engine.host_adapters import HostAdapters
from asyncllm.engine.integrity import check_idle
from asyncllm.engine.loop.control import Control, EngineCommand
from asyncllm.engine.loop.inbox import Inbox
from asyncllm.engine.loop.launched_steps import LaunchedSteps
from asyncllm.engine.loop.open_requests import OpenRequests
from asyncllm.engine.loop.turns import Turns
from asyncllm.engine.loop.watchdog import Watchdog
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.backpressure import Backpressure
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request, Sequence
from asyncllm.engine.stats import EngineStats, scheduler_stats
from asyncllm.errors import AsyncLLMError, EngineClosed, EngineDead, EngineError
from asyncllm.event_loop.owner_process import OwnerProcess
from asyncllm.event_loop.request_gate import RequestGate
from asyncllm.protocol import Command, Executor
from asyncllm.types import RequestRecord

__all__ = ["Death", "EngineLoop"]

logger = logging.getLogger("asyncllm")

COMMAND_PATIENCE = 10
"""A command may take this many times as long as a step: waking the model reads its checkpoint again."""


class Death(NamedTuple):
    """Why an engine loop died."""

    cause: BaseException
    lost_device: bool
    """Whether this process can no longer use the device, so that a new engine would not help."""


class EngineLoop:
    """States: running, then closed or dead. Only its turns write its state and that of its parts. Calls from outside
    leave a message in the inbox, or a command with `Control`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        bounds: Backpressure | None = None,
        *,
        adapters: AdapterTable | None = None,
        num_host_adapters: int = 0,
        gate: RequestGate | None = None,
        observers: list[Callable[[RequestRecord], None]] | None = None,
        stall_timeout: float = 0.0,
        name: str,
    ) -> None:
        """Start in the running event loop.

        `num_host_adapters`: how many adapters host memory has room for; the executor has read the first ones.
        `gate`: the RequestGate that prompts pass on their way here.
        `observers`: functions to call with the record of each request that ends.
        `stall_timeout`: seconds of work without a completed step after which the loop dies; 0 for none. A command may
        take `COMMAND_PATIENCE` times as long.
        """
        self._event_loop = asyncio.get_running_loop()
        self._process = OwnerProcess()
        self._state = "running"
        self._cause: BaseException | None = None
        """The error that killed the loop."""
        self._lost_device = False
        self._fatal: Exception | None = None
        """An error that has to kill the loop. Written by the callbacks of watchdog and executor."""
        self._ended: asyncio.Future[None] = self._event_loop.create_future()
        """Done when no further turn will run."""

        self.scheduler = scheduler
        self.adapters = adapters if adapters is not None else AdapterTable(0, {})
        bounds = bounds if bounds is not None else Backpressure()
        self._executor = executor
        self._watchdog = Watchdog(self._event_loop, stall_timeout, self._note_stall)
        self._steps = LaunchedSteps(scheduler, executor, self._watchdog)
        self._inbox = Inbox(scheduler, bounds, gate if gate is not None else RequestGate())
        self._turns = Turns(self._inbox, self._steps, self._turn)
        self.host_adapters = HostAdapters(executor, num_host_adapters, self._steps.when_read)
        self.host_adapters.begin_with(islice(self.adapters, num_host_adapters))
        commands = Watchdog(self._event_loop, COMMAND_PATIENCE * stall_timeout, self._note_command_stall)
        self._control = Control(executor, scheduler, self._turns.wake, commands)
        self._open = OpenRequests(
            scheduler,
            bounds,
            observers if observers is not None else [],
            on_deadline=self._deadline_passed,
            on_adapter_unused=self.drop,
        )
        executor.watch(self._turns.step_done, self._note_executor_died)
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
        return self._open.all()

    @property
    def sleep_level(self) -> int:
        """The level of `sleep` (1 or 2) until everything is awake again, then 0."""
        return self._control.sleep_level

    def preparing(self, delivery: Delivery, session_id: int) -> AbstractContextManager[None]:
        """Return a context in which an answer's request is made and opened, and where `stop_session` finds it."""
        return self._open.preparing(delivery, session_id)

    def stop_session(self, session_id: int) -> list[Request]:
        """Stop the answers of this id, those too whose requests are not open yet, and return the others' requests."""
        self._open.stop_preparing(session_id)
        running = [request for request in self._open.all() if request.session_id == session_id]
        for request in running:
            self.abandon(request)
        return running

    def open(self, request: Request) -> None:
        """Queue a request that `InputProcessor` made. Raises QueueFull, DeadlineExceeded, EngineError."""
        self.check_running()
        self._open.check_deadline(request)
        hold = self._control.hold or self._control.drains
        self._inbox.check_queue(request, self._event_loop.time(), hold=hold)
        self._open.open(request)
        self._inbox.put(request)
        self._watchdog.watch()
        self._turns.wake()

    @property
    def paused(self) -> bool:
        """Whether no step is launched until `Resume`."""
        return self._control.paused

    async def change(self, command: Command | EngineCommand) -> None:
        """Carry out a command while no step is in flight. Raises EngineError, and the command's own
        errors.

        A cancellation withdraws a command that has not begun; one that has begun is carried out.
        """
        self.check_running()
        await self._control.ask(command)

    @asynccontextmanager
    async def holding_adapter(self, request: Request) -> AsyncGenerator[None, None]:
        """Keep a request's adapter in host memory during the block, which opens the request.

        Raises DeadlineExceeded, EngineError, ModelError if the adapter can no longer be read, and InvalidParameter if
        it has been unloaded. If the adapter is replaced meanwhile, the request uses the new one.
        """
        if request.adapter is None:
            yield
            return
        while True:
            if request.adapter.retired:
                request.adapter = self.adapters.find(request.adapter.name)
            async with self.host_adapters.holding(request.adapter, request.policy.deadline):
                if not request.adapter.retired:
                    yield
                    return

    def drop(self, adapter: Adapter) -> None:
        """Free the memory of an unloaded adapter, unless an open request uses it; the end of the last such request
        calls this again."""
        if self._state == "running":
            if adapter.retired and not adapter.num_requests:
                self.scheduler.adapters.forget(adapter.number)
            self.host_adapters.released(adapter)

    def abandon(self, request: Request) -> None:
        """End a request whose reader has left, at the next turn."""
        self._inbox.abandoned.append(request)
        self._turns.wake()

    def abandon_threadsafe(self, request: Request) -> None:
        """Like `abandon`, but callable from a finalizer, which may run in any thread."""
        with contextlib.suppress(RuntimeError):
            # Raised by a closed event loop, in which no request is open.
            self._event_loop.call_soon_threadsafe(self.abandon, request)

    def _deadline_passed(self, request: Request) -> None:
        """End an expired request at the next turn. Called by its timer."""
        self._inbox.overdue.append(request)
        self._turns.wake()

    def _note_stall(self) -> None:
        steps, scheduler = len(self._steps), self.scheduler
        waits_for = f"{steps} steps in flight, which do not complete" if steps else "a step to be scheduled"
        self._fatal = TimeoutError(
            f"No step has completed for {self._watchdog.timeout:g} s (stall_timeout), and the loop waits for "
            f"{waits_for}: {scheduler.num_running} sequences run, {scheduler.num_waiting} wait, "
            f"{scheduler.blocks.num_available} of {scheduler.blocks.num_blocks} blocks are available."
        )
        self._turns.wake()

    def _note_command_stall(self) -> None:
        self._fatal = TimeoutError(
            f"A command ({self._control.under_way}) was not carried out within {COMMAND_PATIENCE} times "
            f"{self._watchdog.timeout:g} s (stall_timeout)."
        )
        self._turns.wake()

    def _note_executor_died(self, error: Exception) -> None:
        self._fatal = error
        self._turns.wake()

    def _turn(self) -> None:
        """Do all pending work. An error in it kills the engine."""
        if self._state != "running":
            return
        try:
            self._advance()
        except BaseException as error:
            logger.exception("The engine loop died.")
            # The traceback would keep the local variables of every function on it alive.
            traceback.clear_frames(error.__traceback__)
            self._state, self._cause = "dead", error
            from_device = error is self._fatal or error is self._steps.fatal
            self._lost_device = from_device and not self._executor.isolated
            self._stop_turns()
            if not isinstance(error, Exception):
                raise

    def _advance(self) -> None:
        """Empty the inbox, read a step, launch the next ones, then deliver what was read."""
        if self._fatal is not None:
            raise self._fatal
        steps, turns = self._steps, self._turns
        self._empty_inbox()
        advanced: list[Sequence] | None = None
        if steps.oldest_is_done and not turns.readers_first:
            advanced = steps.read()
        self._control.advance(quiet=not steps)
        if not self._control.hold:
            steps.launch()
        if advanced is not None:
            if self._open.deliver(advanced):
                turns.readers_woken()
            if (self.scheduler.num_waiting or self._control.drains) and steps.has_room:
                # An answer that ended at a stop word may have freed blocks or a slot, or have been the last of all.
                turns.wake()
        if steps.oldest_is_done and not turns.readers_first:
            turns.wake()
        if steps or (self._open and not self._control.hold):
            self._watchdog.watch()
        else:
            self._watchdog.rest()

    def _empty_inbox(self) -> None:
        inbox = self._inbox
        if inbox.arrived:
            for request in inbox.take_arrived(ended=self._control.drains):
                self.scheduler.add(request)
        while inbox.abandoned:
            self._open.abandon(inbox.abandoned.popleft())
        while inbox.overdue:
            self._open.expire(inbox.overdue.popleft())

    def _stop_turns(self) -> None:
        """Run no more turns, and let the task end the open requests."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def _run(self) -> None:
        """Wait for the engine's end, then end the open requests: the engine's task."""
        try:
            await self._ended
        except asyncio.CancelledError:
            self._state = "closed"
            raise
        finally:
            self._watchdog.rest()
            self._open.end_all(lambda: self._end_error("request"))
            self._inbox.clear()
            await self._steps.end(wait=self._fatal is None)
            self.scheduler.clear()
            self.host_adapters.end(self._end_error("call"))
            await self._control.end(self._end_error("call"), wait=self._fatal is None)

    def _end_error(self, what: str) -> AsyncLLMError:
        """Return the error of a request or call that the end of the engine interrupts; `what` names which."""
        if self._state == "dead":
            error = EngineDead(f"The engine loop died of {self._cause!r} while this {what} was running.")
            error.__cause__ = self._cause
            return error
        return EngineClosed(f"The engine was closed while this {what} was running.")

    def stats(self, num_sessions: int) -> EngineStats:
        """Return a snapshot of the engine's counters and contents."""
        arrived, opened = self._inbox.arrived, self._open
        queued_requests, queued_tokens = self._inbox.num_queued(hold=self._control.hold)
        return EngineStats(
            **scheduler_stats(self.scheduler, sum(len(request.sequences) for request in arrived)),
            queued_requests=queued_requests,
            queued_tokens=queued_tokens,
            sessions=num_sessions,
            steps_in_flight=len(self._steps),
            requests_started=opened.num_started,
            requests_finished=opened.num_finished,
            requests_cancelled=opened.num_cancelled,
            requests_failed=opened.num_failed,
            requests_expired=opened.num_expired,
            requests_refused=self._inbox.num_refused,
            sleep_level=self._control.sleep_level,
            weight_updates=self._control.num_updates,
            adapters_in_host_memory=self.host_adapters.num_present,
            adapter_reads=self.host_adapters.num_reads,
            seconds_since_progress=self._watchdog.seconds_since_progress,
            step_ms=self._steps.step_ms,
        )

    def check_idle(self) -> None:
        """Raise AssertionError if a request is open, or a row or block is held. For tests.

        Steps that were launched before the last answer ended may still be running. They hold the blocks that they may
        write until they have been read; `stats()` counts these blocks.
        """
        check_idle(self.scheduler, len(self._open), num_in_flight=len(self._steps))
