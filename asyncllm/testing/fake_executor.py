"""FakeExecutor: a FakeDevice in a thread, which completes steps late and independently of the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from asyncllm.agent.executor import Agent, LostSteps, compute
from asyncllm.agent.step_thread import set_exception, set_result
from asyncllm.errors import AsyncLLMError, EngineClosed
from asyncllm.protocol import Batch, Command, Limits, LoadAdapter, StepDropped, StepFailed, StepOutput
from asyncllm.testing.fake_device import FakeDevice
from asyncllm.testing.oracles import Oracle

__all__ = ["FakeExecutor"]

_Job = tuple[Batch | Command, "asyncio.Future[Any]"]


class FakeExecutor:
    """An Executor for tests: deterministic tokens, a real thread, and faults on request.

    Steps run in order in one worker thread. `pause()` holds them back until `advance(k)` or `resume()`, so that a test
    controls when the device is late.
    """

    isolated = False

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_slots: int = 16,
        vocab_size: int = 258,
        hidden_size: int = 16,
        max_position: int = 4096,
        max_steps_in_flight: int = 2,
        num_host_blocks: int = 0,
        min_copied_tokens: int = 1,
        windows: Sequence[int | None] = (None,),
        num_adapter_slots: int = 0,
        num_host_adapters: int = 64,
        adapters: Sequence[int] = (),
        oracle: Oracle | None = None,
        row_failure: Callable[[list[int]], str | None] | None = None,
        forces: Callable[[list[int]], int] | None = None,
        latency: float = 0.0,
        fail_at: int | None = None,
        start_error: Exception | None = None,
        wrap: Callable[[Agent], Agent] | None = None,
        command_error: Callable[[Command], Exception | None] | None = None,
        adapter_error: Callable[[LoadAdapter], Exception | None] | None = None,
    ) -> None:
        """`latency`: seconds per step. `fail_at`: number of the step, from 0, at which the device fails for good.
        `start_error`: raised by `start()`. `wrap`: see `open_executor`. `command_error`: returns the error that a
        command raises in place of being carried out, or None; `adapter_error` does so for an adapter. Other arguments:
        see FakeDevice.

        Any error of the device except StepViolation ends the rows of its step only."""
        self.device = FakeDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            max_position=max_position,
            max_steps_in_flight=max_steps_in_flight,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=min_copied_tokens,
            windows=windows,
            num_adapter_slots=num_adapter_slots,
            num_host_adapters=num_host_adapters,
            oracle=oracle,
            row_failure=row_failure,
            forces=forces,
        )
        self.device.adapters.update(adapters)
        self._agent: Agent = self.device if wrap is None else wrap(self.device)
        self._lost = LostSteps()
        self.latency = latency
        self.fail_at = fail_at
        self.start_error = start_error
        self.command_error = command_error
        self.adapter_error = adapter_error
        self.commands: list[Command] = []
        """Every command, in order."""
        self.batches: list[Batch] = []
        """Every submitted batch, in order."""
        self.num_completed = 0
        self.max_in_flight = 0
        """Maximum number of steps in flight at one time."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._gate = threading.Condition()
        self._allowance: float = inf  # steps that may still complete; guarded by the gate
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._on_step: Callable[[], None] = lambda: None

    def watch(self, on_step: Callable[[], None], on_death: Callable[[Exception], None]) -> None:
        """See `StepExecutor`."""
        self._on_step = on_step

    async def start(self) -> Limits:
        if self.start_error is not None:
            raise self.start_error
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="fake-executor", daemon=True)
        self._thread.start()
        return self.device.limits

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        if self._loop is None or self._closing.is_set():
            raise EngineClosed("The executor does not run: start() comes first, and nothing after close().")
        future: asyncio.Future[StepOutput] = self._loop.create_future()
        self.batches.append(batch)
        self.max_in_flight = max(self.max_in_flight, len(self.batches) - self.num_completed)
        self._jobs.put((batch, future))
        return future

    def carry_out(self, command: Command) -> asyncio.Future[None]:
        """Carry out a command at once, even while paused. Raises AssertionError while a step is in flight."""
        assert len(self.batches) == self.num_completed, "a command comes while a step is in flight"
        if self._loop is None or self._closing.is_set():
            raise EngineClosed("The executor does not run: start() comes first, and nothing after close().")
        future: asyncio.Future[None] = self._loop.create_future()
        self.commands.append(command)
        self._jobs.put((command, future))
        return future

    def load_adapter(self, adapter: LoadAdapter) -> asyncio.Future[str]:
        """Record an adapter as loaded at once, even while paused."""
        if self._loop is None or self._closing.is_set():
            raise EngineClosed("The executor does not run: start() comes first, and nothing after close().")
        future: asyncio.Future[str] = self._loop.create_future()
        error = None if self.adapter_error is None else self.adapter_error(adapter)
        if error is None:
            future.set_result(self.device.load_adapter(adapter))
        else:
            future.set_exception(error)
        return future

    def drop_adapter(self, number: int) -> None:
        """Unload an adapter."""
        self.device.drop_adapter(number)

    async def close(self) -> None:
        self._closing.set()
        self._allow(inf)
        self._jobs.put(None)
        if self._stopped is not None:
            await asyncio.shield(self._stopped)  # all results are delivered by then
        while self._thread is not None and self._thread.is_alive():  # noqa: ASYNC110 - a thread's end has no awaitable
            await asyncio.sleep(0.0005)
        self._thread = None

    def pause(self) -> None:
        """Stop completing steps, except as `advance` allows."""
        self._allow(0)

    def advance(self, steps: int = 1) -> None:
        """Let `steps` more steps complete while paused."""
        self._allow(self._allowance + steps)

    def resume(self) -> None:
        """Complete steps as they arrive again."""
        self._allow(inf)

    def _allow(self, steps: float) -> None:
        with self._gate:
            self._allowance = steps
            self._gate.notify_all()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            if isinstance(work, Batch):
                self._run(work, future)
            else:
                error = self._attempt(work)
                if error is None:
                    self._post(set_result, future, None)
                else:
                    self._post(set_exception, future, error)
        assert self._stopped is not None
        self._post(self._stopped.set_result, None)

    def _run(self, batch: Batch, future: asyncio.Future[StepOutput]) -> None:
        with self._gate:
            self._gate.wait_for(lambda: self._allowance > 0)
            self._allowance -= 1
        if self.latency:
            self._closing.wait(self.latency)
        if self._closing.is_set():
            self._post(self._complete, future, None, EngineClosed("The executor was closed before this step ran."))
            return
        output: StepOutput | None = None
        error = self._error
        if error is None:
            try:
                if self.fail_at is not None and self.device.num_steps >= self.fail_at:
                    raise RuntimeError(f"the fake device fails at step {batch.step}, as it was told to")
                output = compute(self._agent, batch, self._lost)
            except (StepFailed, StepDropped) as failure:
                error = failure
            except Exception as failure:
                error = self._error = failure
        try:
            self._post(self._complete, future, output, error)
        finally:
            del error, future  # the error refers to this frame

    def _attempt(self, command: Command) -> BaseException | None:
        if self._error is not None:
            return self._error
        error = None if self.command_error is None else self.command_error(command)
        if error is None:
            self.device.carry_out(command)
        elif not isinstance(error, AsyncLLMError):
            self._error = error
        return error

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        # A loop that closed without closing the executor no longer has a reader.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def _complete(
        self, future: asyncio.Future[StepOutput], output: StepOutput | None, error: BaseException | None
    ) -> None:
        self.num_completed += 1
        if future.cancelled():
            pass
        elif output is not None:
            future.set_result(output)
        else:
            assert error is not None
            future.set_exception(error)
            if self._closing.is_set():
                future.exception()  # the caller that closes the executor knows that waiting steps are dropped
        del error, future, output  # an error refers to this frame, and the frame to those that called
        self._on_step()
