"""StepThread: one worker thread that loads the model, and computes its steps or waits for them.

The thread imports torch and the model side; this file imports neither. No setting of the process is changed. Torch's
thread count is set for this thread only, and only if the user has not set it (`agent/cpu_threads.py`). The
interpreter's switch interval can stay, because torch releases the interpreter lock inside every operation: while
1,900-token prompts are computed on two busy cores, the median iteration of a loop that sleeps 0.5 ms takes 1.16 ms,
against 1.13 ms without a step.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from asyncllm.errors import AsyncLLMError, EngineClosed, EngineDead, ModelError
from asyncllm.event_loop.in_thread import starting_thread
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import Limits

__all__ = ["HasLimits", "StepThread", "attempt", "dead", "set_exception", "set_result", "set_seen_exception"]

THREAD_NAME = "asyncllm-step"

EXIT_PATIENCE_S = 10.0
"""How long interpreter exit waits for running steps. A step on a lost device may never end."""

_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()
"""Step threads -> the function that tells each to end."""

_Result = TypeVar("_Result")


class HasLimits(Protocol):
    """The object that a `StepThread` loads."""

    @property
    def limits(self) -> Limits: ...


_Runner = TypeVar("_Runner", bound=HasLimits)


class StepThread(Generic[_Runner]):
    """Does all work on a runner in one thread, which `start` begins and `close` ends.

    `load` creates the runner in that thread. Only the thread refers to it, so it is freed when the thread ends, or when
    work raises a fatal error. States: new, started (loading, then running, possibly dead), closed.
    """

    def __init__(self, load: Callable[[], _Runner], *, release: Callable[[], None] | None = None) -> None:
        """`release` is called last in the thread, after the runner is gone."""
        self._load: Callable[[], _Runner] | None = load
        self._release = release
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: _Worker[_Runner] | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None

    async def start(self) -> Limits:
        """Load in the worker thread. Raises the error of `load`, as a ModelError unless it is one of asyncllm's, and
        EngineError if the system refuses the thread.

        After an error the thread has ended. After a cancellation it ends by itself once `load` returns.
        """
        if self._load is None:
            raise EngineClosed("This executor was started or closed before. Make a new one.")
        load, self._load = self._load, None
        loop = self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Limits] = loop.create_future()
        self._ended = loop.create_future()
        worker: _Worker[_Runner] = _Worker(loop)
        self._worker = worker
        thread = threading.Thread(
            target=worker.run, args=(load, self._release, loaded, self._ended), name=THREAD_NAME, daemon=True
        )
        with starting_thread():
            thread.start()
        self._thread = thread
        _running[thread] = worker.stop
        # An executor that is dropped without close, or lives until the program ends, still ends its thread.
        weakref.finalize(self, worker.stop)
        try:
            return await loaded
        except asyncio.CancelledError:
            worker.stop()
            raise
        except BaseException:
            await self.close()
            raise

    def submit(
        self,
        work: Callable[[_Runner], _Result],
        *,
        spares: tuple[type[Exception], ...] = (),
        then: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[_Result]:
        """Enqueue work on the runner, and return the future of its result.

        The future raises the work's error. Unless that is one of `spares`, it is fatal: the futures of all later work
        raise EngineDead with it as cause. `then` is called in the event loop as soon as the future is done, in the same
        iteration. Raises EngineClosed unless started and not closed.
        """
        if self._loop is None or self._worker is None or self._worker.stopping:
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        future: asyncio.Future[_Result] = self._loop.create_future()
        self._worker.queue.put(_Entry(work, spares, future, then))
        return future

    async def close(self) -> None:
        """Let the running work finish, end waiting work with EngineClosed, end the thread. Idempotent."""
        self._load = None
        if self._worker is None or self._thread is None or self._ended is None:
            return
        self._worker.stop()
        if asyncio.get_running_loop() is self._loop:
            await asyncio.shield(self._ended)
            # The thread has made its last call and ends within microseconds, but a join would block the event loop.
            while self._thread.is_alive():  # noqa: ASYNC110 - the end of a thread cannot be awaited
                await asyncio.sleep(0)
        else:
            await asyncio.to_thread(self._thread.join)


class _Entry(NamedTuple):
    """Work for the thread."""

    work: Callable[[Any], Any]
    """Called with the runner."""
    spares: tuple[type[Exception], ...]
    """Errors that leave the runner unchanged."""
    future: asyncio.Future[Any]
    then: Callable[[], None]
    """Called in the event loop when the future is done."""


class _Worker(Generic[_Runner]):
    """The thread's side. It does not refer to the executor, which may be dropped while the thread runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: SimpleQueue[_Entry | None] = SimpleQueue()
        """Work to run; None ends the thread."""
        self.stopping = False
        self._loop = loop

    def stop(self) -> None:
        self.stopping = True
        self.queue.put(None)

    def run(
        self,
        load: Callable[[], _Runner],
        release: Callable[[], None] | None,
        loaded: asyncio.Future[Limits],
        ended: asyncio.Future[None],
    ) -> None:
        try:
            self._serve(load, loaded)
            del load
            if release is not None:
                release()
        finally:
            self._call(set_result, ended, None)

    def _serve(self, load: Callable[[], _Runner], loaded: asyncio.Future[Limits]) -> None:
        runner, failure = attempt(load)
        if failure is not None:
            self._call(set_exception, loaded, _load_error(failure))
        elif runner is not None:
            self._call(set_result, loaded, runner.limits)
        del load
        while (entry := self.queue.get()) is not None:
            work, spares, future, then = entry
            if self.stopping:
                closed = EngineClosed("The executor was closed before this step ran.")
                self._call(_end, set_seen_exception, future, closed, then)
            elif runner is None:
                self._call(_end, set_seen_exception, future, dead(failure), then)
            else:
                output, failure = attempt(work, runner)
                if failure is None:
                    self._call(_end, set_result, future, output, then)
                else:
                    if not isinstance(failure, spares):
                        runner = None
                    self._call(_end, set_exception, future, failure, then)
                del output
            # Keep nothing of this step alive while the thread waits for the next one.
            del entry, work, spares, future, then

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The event loop was closed before the executor, so no task waits.
            self.stop()


def _end(
    settle: Callable[[asyncio.Future[Any], Any], None], future: asyncio.Future[Any], how: Any, then: Callable[[], None]
) -> None:
    """Settle the future of some work in the event loop, and call `then` at once."""
    settle(future, how)
    then()
    # An error raised in `then` would refer to this frame.
    del how, then


def dead(cause: BaseException | None) -> EngineDead:
    """Return the error of a step after one that failed because of `cause`."""
    error = EngineDead("An earlier step failed, and no step runs after that. The cause is chained.")
    error.__cause__ = cause
    return error


def set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if isinstance(error, StopIteration):
        # A future cannot carry this error, and would stay pending.
        error, cause = RuntimeError("A step raised StopIteration."), error
        error.__cause__ = cause
    if not future.done():
        future.set_exception(error)


def set_seen_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set an error that follows from an earlier one, so that asyncio does not log it if it is never retrieved."""
    set_exception(future, error)
    retrieve(future)


def _load_error(error: BaseException) -> BaseException:
    if isinstance(error, AsyncLLMError):
        return error
    failure = ModelError(f"Loading the model failed with {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def attempt(call: Callable[..., _Result], *args: Any) -> tuple[_Result | None, BaseException | None]:
    """Return the result of the call, or its error.

    Through the frames of its traceback an error would keep the model alive. They are cleared here, before another
    thread raises the error again; file names and lines stay.
    """
    try:
        return call(*args), None
    except BaseException as error:
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        # This frame is part of the traceback, and cannot be cleared while it runs.
        del call, args
        return None, error


def _end_threads() -> None:
    """Let the running steps finish. Interpreter exit kills daemon threads, which inside torch ends the process by
    SIGABRT; a non-daemon thread would keep a program that never calls `close` from ending."""
    deadline = time.monotonic() + EXIT_PATIENCE_S
    for stop in list(_running.values()):
        stop()
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))


# By then all non-daemon threads of the program have ended, and their event loops with them.
atexit.register(_end_threads)
