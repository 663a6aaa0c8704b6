"""LaunchedSteps: the steps between the scheduler and the executor, from launch to reading."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from asyncllm.engine.loop.watchdog import Watchdog
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Sequence
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import Executor, StepDropped, StepFailed, StepOutput

__all__ = ["LaunchedSteps"]

logger = logging.getLogger("asyncllm")

PIPELINE_DEPTH = 2
"""Steps in flight: one on the device, one ready to follow it."""

STEP_MS_WEIGHT = 0.05
"""Weight of the newest step in the moving average of step times."""


class LaunchedSteps:
    """Steps in flight, oldest first. Written by the engine's turns; the executor resolves their futures."""

    def __init__(self, scheduler: Scheduler, executor: Executor, watchdog: Watchdog) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._watchdog = watchdog
        self._futures: deque[asyncio.Future[StepOutput]] = deque()
        self._fenced: deque[tuple[asyncio.Future[StepOutput], Callable[[], None]]] = deque()
        """Calls to make once a step, and all steps before it, have been read."""
        self._settling = False
        """Whether a step has failed and steps launched after it are unread. No step is launched until they are read."""
        self.fatal: BaseException | None = None
        """An error of a step after which the device may be unusable."""
        self.step_ms = 0.0
        """Moving average of the time of a step on the device, in milliseconds."""

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def oldest_is_done(self) -> bool:
        """Whether a step is ready to be read."""
        return bool(self._futures) and self._futures[0].done()

    @property
    def has_room(self) -> bool:
        """Whether another step can be launched."""
        return len(self._futures) < self._depth()

    def _depth(self) -> int:
        """Return how many steps to keep in flight: few while a sequence waits, so that it is admitted soon."""
        limit = self._scheduler.max_steps_in_flight
        return min(PIPELINE_DEPTH, limit) if self._scheduler.num_waiting else limit

    def launch(self) -> None:
        """Keep the pipeline full. After a failed step, drain it first, because the steps in it build on the failed
        one."""
        if self._settling and self._futures:
            return
        self._settling = False
        scheduler = self._scheduler
        while self.has_room:
            batch = scheduler.schedule()
            for request in scheduler.admitted:
                if request.times.admitted is None:
                    request.times.admitted = time.monotonic()
            scheduler.admitted.clear()
            if batch is None:
                return
            self._futures.append(self._executor.submit(batch))

    def read(self) -> list[Sequence]:
        """Read the oldest step, which is done. Return the sequences that advanced or ended. Raises fatal errors."""
        future = self._futures.popleft()
        if future.cancelled():
            raise RuntimeError("the executor cancelled a step")
        # Raising a survivable error here would attach this frame to it, and keep alive all that ends with the step.
        match future.exception():
            case None:
                output = future.result()
            case StepFailed(__cause__=cause):
                self._settling = True
                ended = self._scheduler.step_failed(cause)
                self._lift_fence(future)
                logger.error("A step failed, and %d answers with it; the engine goes on.", len(ended), exc_info=cause)
                return ended
            case StepDropped():
                self._scheduler.step_dropped()
                self._lift_fence(future)
                return []
            case error:
                self.fatal = error
                raise error
        self._watchdog.step_completed()
        self.step_ms += STEP_MS_WEIGHT * (output.elapsed_ms - self.step_ms)
        advanced = self._scheduler.update(output)
        self._lift_fence(future)
        if self._scheduler.prefilled:
            now = time.monotonic()
            for request in self._scheduler.prefilled:
                if request.times.prefilled is None:
                    request.times.prefilled = now
            self._scheduler.prefilled.clear()
        return advanced

    def when_read(self, call: Callable[[], None]) -> None:
        """Make a call when all steps in flight have been read."""
        if self._futures:
            self._fenced.append((self._futures[-1], call))
        else:
            call()

    def _lift_fence(self, read: asyncio.Future[StepOutput]) -> None:
        while self._fenced and self._fenced[0][0] is read:
            self._fenced.popleft()[1]()

    async def end(self, *, wait: bool) -> None:
        """Forget the steps in flight, and if `wait`, wait until they are done, no longer than a stall. The engine has
        ended."""
        self._fenced.clear()
        for future in self._futures:
            future.add_done_callback(retrieve)
        if self._futures and wait:
            await asyncio.wait(self._futures, timeout=self._watchdog.timeout or None)
        self._futures.clear()
