"""The check that runs after every test notices each kind of leak."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockingError

import asyncllm
from tests.leaks import LeakCheck, without_leftover_tasks


@pytest.fixture
def check(_nothing_left_over: LeakCheck) -> Iterator[LeakCheck]:
    check = LeakCheck(grace=0.02)
    check.begin()
    yield check
    _nothing_left_over.errors.clear()  # caused on purpose, and seen by the check under test


def test_clean(check: LeakCheck) -> None:
    check.end()


def test_thread(check: LeakCheck) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over")
    thread.start()
    with pytest.raises(AssertionError, match="thread 'left-over'"):
        check.end()
    release.set()
    thread.join()


def test_thread_that_ends_within_the_grace_period() -> None:
    check = LeakCheck(grace=2)
    check.begin()
    threading.Timer(0.03, lambda: None).start()
    check.end()


def test_file_descriptor(check: LeakCheck) -> None:
    read, write = os.pipe()
    with pytest.raises(AssertionError, match=rf"file descriptor {read} -> pipe"):
        check.end()
    os.close(read)
    os.close(write)


def test_future_with_an_exception_nobody_read(check: LeakCheck) -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    future.set_exception(ValueError("unseen"))
    del future
    loop.close()
    with pytest.raises(AssertionError, match="never retrieved"):
        check.end()


def test_error_in_a_finalizer(check: LeakCheck) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    broken = Broken()
    cycle = [broken]
    cycle.append(cycle)  # type: ignore[arg-type]
    del broken, cycle
    with pytest.raises(AssertionError, match="in a finalizer"):
        check.end()


def test_hooks_are_put_back(check: LeakCheck) -> None:
    installed = sys.unraisablehook
    check.end()
    assert sys.unraisablehook is not installed
    assert logging.getLogger("asyncio").handlers.count(check._handler) == 0


def test_engine_that_lost_a_block(check: LeakCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def check_idle(self) -> None:
            raise AssertionError("block 3 is neither free nor cached")

    engine = Engine()
    module = types.ModuleType("asyncllm.engine.lifecycle")
    module._live = weakref.WeakSet([engine])  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "asyncllm.engine.lifecycle", module)
        with pytest.raises(AssertionError, match="block 3 is neither free nor cached"):
            check.end()


def test_task() -> None:
    async def leaves_a_task() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(60)))

    async def run() -> None:
        with pytest.raises(AssertionError, match="left tasks over"):
            await without_leftover_tasks(leaves_a_task, grace=0.02)()
        tasks.pop().cancel()

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(run())
    gc.collect()


@pytest.mark.anyio
async def test_async_tests_run_on_both_loops(anyio_backend: tuple[str, dict[str, bool]]) -> None:
    uses_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    assert uses_uvloop == anyio_backend[1]["use_uvloop"]


def test_blocking_call_of_ours_is_noticed() -> None:
    source = "import time\nasync def block():\n    time.sleep(0.001)\n"
    names: dict[str, Any] = {}
    exec(compile(source, str(Path(asyncllm.__file__).with_name("blocks.py")), "exec"), names)
    with pytest.raises(BlockingError):
        asyncio.run(names["block"]())
