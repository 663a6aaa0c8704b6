"""Holds for every test: nothing is left over, the loop is never blocked, async tests run on asyncio and uvloop, unless
they are marked `one_loop`."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from tests.leaks import LeakCheck, without_leftover_tasks

HAS_GPU = os.path.exists("/dev/nvidiactl")
if not HAS_GPU:
    # Decided when a kernel is decorated, so before the first import of one.
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models, and several test runs may share the machine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `gpu` out where there is none, and `one_loop` out of all event loops but the last."""
    items[:] = [item for item in items if not (item.get_closest_marker("one_loop") and _loop_of(item) in LOOPS[:-1])]
    if not HAS_GPU:
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


LOOPS = ["asyncio"]
if sys.platform != "win32":
    LOOPS.append("uvloop")


def _loop_of(item: pytest.Item) -> object:
    """Return which of `LOOPS` an async test runs on; None for others."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("anyio_backend")


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights, in which every other token ends the answer: answers are short."""
    from tests.checkpoints import build_checkpoint

    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_checkpoint("llama", folder, vocab_size=384, max_position_embeddings=8192)
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    settings["eos_token_id"] = [3, *range(4, 384, 2)]
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _open_lasting_files() -> None:
    """uvloop opens a pipe once per process, and CUDA its devices; let neither be the doing of any test."""
    if sys.platform != "win32":
        import uvloop

        uvloop.run(asyncio.sleep(0))
    if HAS_GPU:
        import torch

        if torch.cuda.is_available():
            one = torch.ones(1, 1, device="cuda")
            (one @ one).item()


@pytest.fixture(scope="session", autouse=True)
def _loop_never_blocks() -> Iterator[None]:
    """A blocking call that asyncllm makes in a thread with a running event loop raises BlockingError.

    The pipeline is synchronous: who calls it inside a running loop has chosen to wait. An executor joins its thread
    after the thread's last word. Who needs masks fills them beside the threads that do, and awaits their last ones.
    """
    with blockbuster_ctx(scanned_modules=["asyncllm"]) as detector:
        for function in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
            detector.functions[function].can_block_in(
                "asyncllm/event_loop/loop_thread.py", {"__init__", "wait", "close"}
            )
            detector.functions[function].can_block_in("asyncllm/agent/step_thread.py", {"close"})
            detector.functions[function].can_block_in("asyncllm/agent/sampling/grammar_masks.py", {"finish"})
        yield


MODULES = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _collect_between_modules() -> Iterator[None]:
    """Free what tests have left frozen. To look through all that is imported takes a second or two: not every time."""
    yield
    if next(MODULES) % 16 == 0:
        gc.unfreeze()
        gc.collect()


@pytest.fixture(autouse=True)
def _log_level_as_before() -> Iterator[None]:
    """A pipeline sets the package's level, as LMDeploy's does."""
    package = logging.getLogger("asyncllm")
    level = package.level
    yield
    package.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[LeakCheck]:
    check = LeakCheck()
    check.begin()
    yield check
    check.end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pyfuncitem.obj = without_leftover_tasks(pyfuncitem.obj)
    return (yield)
