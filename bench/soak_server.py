"""The server of a soak: `asyncllm.server.run` in a process of its own, as `asyncllm serve` starts it.

Beside it, this process tells what only it can know: the engine's counts, and when the blocks of aborted requests were
back.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.agent.executor import open_executor
from asyncllm.config import ServerConfig
from asyncllm.engine.loop.engine_loop import EngineLoop
from asyncllm.engine.schedule.sequence import Request
from asyncllm.locate import locate
from asyncllm.server.run import run
from asyncllm.testing import Fault, FaultPlan
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import FinishReason

__all__ = ["Server", "started"]

ENGINE = EngineConfig(
    block_size=16,
    num_gpu_blocks=80,
    num_cpu_blocks=80,
    max_batch_size=16,
    max_prefill_token_num=256,
    max_queued_requests=24,
    eviction_type="copy",
)
"""So little memory that running sequences take each other's blocks, and prefixes are evicted all the time."""
SERVER = ServerConfig(server_port=0, log_level="INFO", max_sessions=48, session_ttl=10.0)
NO_KEY = 2**32
"""What the server adds to the session ids of requests without a key."""
START_SECONDS = 300
FAULT_EVERY_S = 10.0
FAULTS: tuple[dict[str, Any], ...] = (
    {"point": "tokenize"},
    {"point": "prefill", "action": "corrupt"},
    {"point": "detokenize"},
    {"point": "decode"},
    {"point": "template"},
    {"point": "decode", "action": "corrupt"},
    {"point": "emit"},
    {"point": "prefill"},
    {"point": "decode", "action": "sleep", "seconds": 0.5},
    {"point": "sample"},
    {"point": "swap"},
    {"point": "sample", "action": "corrupt"},
)
"""Each once, one every `FAULT_EVERY_S`, then from the beginning: what ends requests, and must not end the engine."""


class BlocksBack:
    """Notes when the blocks of aborted requests were back in the pool. Written in the engine's task."""

    def __init__(self, loop: EngineLoop) -> None:
        self.labels = array("q")
        """`session_id`, as clients call it, of each aborted request that had one."""
        self.times = array("d")
        """When its blocks were back, by `time.monotonic`."""
        self._scheduler = loop.scheduler
        self._waiting: dict[Request, int] = {}
        """Aborted requests whose blocks a step in flight may still write -> the last such step."""
        self._last_read = -1
        self._cancel, self._step_read = loop.scheduler.cancel, loop.scheduler.blocks.step_read
        loop.scheduler.cancel = self._cancelled  # type: ignore[method-assign]
        loop.scheduler.blocks.step_read = self._was_read  # type: ignore[method-assign]

    def _cancelled(self, request: Request, reason: FinishReason) -> None:
        self._cancel(request, reason)
        if reason == "abort" and request.session_id is not None:
            self._waiting[request] = max(sequence.last_step for sequence in request.sequences)
            self._look()

    def _was_read(self, step: int) -> None:
        self._step_read(step)
        self._last_read = step
        self._look()

    def _look(self) -> None:
        for request in [each for each, step in self._waiting.items() if step <= self._last_read]:
            del self._waiting[request]
            assert request.session_id is not None
            self.labels.append(request.session_id - NO_KEY)
            self.times.append(time.monotonic())


class Faults:
    """Lets faults come about on a schedule."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self.fired: Counter[str] = Counter()
        """By point and action."""
        self._next = cycle(FAULTS)
        self._planned: Fault | None = None

    def begin(self) -> None:
        """Plan the next one, in the running event loop, and so on."""
        self.settle()
        self._planned = self._plan.add(Fault(**next(self._next)))
        asyncio.get_running_loop().call_later(FAULT_EVERY_S, self.begin)

    def settle(self) -> None:
        """Count what has come about, and forget it. What has not is not planned any more."""
        if self._planned is not None:
            self.fired[f"{self._planned.action} at {self._planned.point}"] += self._planned.num_fired
        self._plan.clear()
        self._planned = None


class Told(NamedTuple):
    """What the server's process says of itself at the end."""

    stats: dict[str, Any]
    back: dict[int, float]
    """By `session_id`, when an aborted request's blocks were back."""
    not_idle: str
    """What an engine at rest still holds; empty: nothing."""
    faults: dict[str, int]
    """How many have come about."""
    python_blocks: int
    """Pieces of memory that objects hold, once garbage is collected."""
    heap_mb: float
    """What malloc has given away, in MB."""


def open_engine(model: str, plan: FaultPlan | None) -> AsyncEngine:
    """The engine, with faults if there are any."""
    if plan is None:
        return AsyncEngine(model, ENGINE)
    folder = locate(model)
    executor = open_executor(ENGINE, folder, wrap=plan.agent)
    return AsyncEngine(
        model, ENGINE, **plan.parts(executor, Tokenizer.from_folder(folder), ChatTemplate.open(folder, None))
    )


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes and pieces."""

    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

    @property
    def given_away(self) -> int:
        """`uordblks` and `hblkhd`: bytes of the heap that are in use, and those of mappings of their own."""
        return int(self.field_7 + self.field_4)


def heap_mb() -> float:
    """Megabytes that malloc has given away and not got back; what it keeps for later goes back to the system now."""
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallocInfo
    return float(libc.mallinfo2().given_away / 1e6)


def serve(model: str, log: str, faults: bool, connection: Connection) -> None:
    """The main function of the server's process. Sends the address; whenever something is received, a `Told`."""
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_file, 2)
    os.close(log_file)
    plan = FaultPlan() if faults else None
    engines: list[AsyncEngine] = []

    def make_engine() -> AsyncEngine:
        engines.append(open_engine(model, plan))
        return engines[-1]

    schedule = Faults(plan) if plan is not None else None

    def announce(url: str) -> None:
        engine = engines[0]  # it dies of none of the faults
        back = BlocksBack(engine.running())
        if schedule is not None:
            schedule.begin()

        def told() -> None:
            connection.recv()
            try:
                engine.check_idle()
                not_idle = ""
            except AssertionError as error:
                not_idle = str(error)
            known = dict(zip(back.labels, back.times, strict=True))
            fired = dict(schedule.fired) if schedule is not None else {}
            gc.collect()
            stats = msgspec.to_builtins(engine.stats())
            connection.send(Told(stats, known, not_idle, fired, sys.getallocatedblocks(), heap_mb()))

        asyncio.get_running_loop().add_reader(connection.fileno(), told)
        connection.send(url)

    uvloop.run(run(make_engine, SERVER, announce))


class Server:
    """The process, seen from outside."""

    def __init__(self, process: multiprocessing.process.BaseProcess, connection: Connection, url: str) -> None:
        self._connection = connection
        self._folder = Path(f"/proc/{process.pid}")
        self.url = url

    def told(self) -> Told:
        """Ask it."""
        self._connection.send(None)
        told: Told = self._connection.recv()
        return told

    def rss_mb(self) -> float:
        """Resident memory in MB (10**6 bytes), pages of files left out: they come and go as others need memory."""
        fields = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024 / 1e6

    def descriptors(self) -> int:
        """Open ones."""
        return len(list((self._folder / "fd").iterdir()))

    def threads(self) -> int:
        """Running and waiting ones."""
        return len(list((self._folder / "task").iterdir()))


@contextmanager
def started(model: str, log: Path, *, faults: bool) -> Iterator[Server]:
    """A server that ends, by SIGTERM, with the block. Raises RuntimeError when it does not start, or does not end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(model, str(log), faults, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(START_SECONDS):
            raise RuntimeError(f"the server is not ready after {START_SECONDS} s")
        try:
            url = here.recv()
        except EOFError:
            raise RuntimeError(f"the server has ended: {log.read_text()[-500:]}") from None
        yield Server(process, here, url)
    finally:
        process.terminate()
        process.join(timeout=90)
        here.close()
        if process.exitcode is None:
            process.kill()
            raise RuntimeError("the server did not end within 90 s of SIGTERM")
