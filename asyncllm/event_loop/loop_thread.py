"""LoopThread: an event loop in a thread of its own, for synchronous callers of asynchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncllm.errors import EngineClosed, EngineError
from asyncllm.event_loop.in_thread import starting_thread
from asyncllm.event_loop.owner_process import OwnerProcess

__all__ = ["LoopThread"]

T = TypeVar("T")

_open: weakref.WeakSet[LoopThread] = weakref.WeakSet()


class LoopThread:
    """Runs coroutines for other threads, from construction until `close`.

    Usable from any thread, with or without a running loop. The thread is not a daemon, so nothing is interrupted at
    interpreter exit: open loops are closed before the interpreter waits for its threads.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Coroutine[Any, Any, None]],
        stop: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Run `start` in the new loop, and raise any error of it. `stop` runs before the loop ends."""
        self._start, self._stop = start, stop
        self._lock = threading.Lock()
        self._process = OwnerProcess()
        self._closing = False
        self._stop_error: Exception | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        try:
            with starting_thread():
                self._thread.start()
        except EngineError:
            self._loop.close()
            raise
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise
        _open.add(self)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the loop. Raises EngineClosed after `close`, EngineError if called from the loop
        itself."""
        try:
            # Checked before the lock, which a thread of the other process may have held.
            self._process.check("pipeline")
            with self._lock:
                if self._closing:
                    raise EngineClosed("The pipeline is closed. Open a new one.")
                if threading.current_thread() is self._thread:
                    raise EngineError("A callback of the pipeline called the pipeline: it would wait for itself.")
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except EngineError:
            coroutine.close()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine's result. An interrupted wait, for example by Ctrl-C, cancels the coroutine."""
        return self.wait(self.submit(coroutine))

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for the result of `submit`."""
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineClosed("The pipeline was closed while this call was running.") from None
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """Begin to close, and return at once. In a forked process there is nothing to close."""
        if self._process.forked:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                # The loop is already gone if `start` failed.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._end.set)

    def close(self) -> None:
        """Cancel running coroutines, run `stop`, wait for the thread, and raise any error of `stop`. Idempotent."""
        self.end()
        if threading.current_thread() is not self._thread and not self._process.forked:
            self._thread.join()
            error, self._stop_error = self._stop_error, None
            if error is not None:
                raise error

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        starting = asyncio.ensure_future(self._start())
        ending = asyncio.ensure_future(self._end.wait())
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        try:
            await starting
        except BaseException as error:
            ending.cancel()
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await ending
        try:
            await self._stop()
        except Exception as error:
            self._stop_error = error  # for `close`


def _close_all() -> None:
    for thread in list(_open):
        thread.close()


# Interpreter exit waits for threads before it runs `atexit` functions. concurrent.futures uses an earlier hook;
# registering after it means running before it, while its threads still accept work.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
