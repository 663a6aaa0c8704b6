"""How busy the event loop is while the engine decodes, and how long the GPU stands still between two steps.

    python bench/cpu.py --model FOLDER [--work b1,b16,b256] [--json FILE]

The loop is asyncio's own with a selector that keeps time. Between two waits for events the loop runs callbacks: that is
a slice. `loop_busy` is the sum of the slices over the wall time; waiting for the interpreter lock after an event counts
as waiting for the event. Requests stream, one reader each, so that delivery is part of what is measured.

On a GPU the same work runs once more under torch's profiler, which gives the start and end of every kernel. A decode
step begins where its first kernel begins, the one whose name matches --opens; if there is none, the kernel that runs as
often as there were steps and has the longest idle time before it. The gap before a step is the time from the latest end
of all earlier kernels, copies not counted. The profiler makes steps longer: compare its step with the one without.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import selectors
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from engines import engine_config, generation_config
from table import emit
from workloads import Work, batch_of, static, token_ids

from asyncllm import AsyncEngine

OPENS = "prepare_decode"
NOT_KERNELS = ("Memcpy", "Memset")

PROFILED_TOKENS = 49
"""Tokens of an answer under the profiler, which keeps some 300 kernels of each step."""


class TimedSelector(selectors.DefaultSelector):
    """A selector that notes when the loop comes to wait and when it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[float] = []
        """Seconds from the end of each wait to the begin of the next."""
        self._resumed = time.perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.slices.append(time.perf_counter() - self._resumed)
        try:
            return super().select(timeout)
        finally:
            self._resumed = time.perf_counter()


class Kernel(NamedTuple):
    """One run of a kernel on the GPU. Times in microseconds on one clock."""

    name: str
    start: float
    end: float


def loop_figures(slices: Sequence[float], wall: float) -> dict[str, float]:
    """Share of `wall` seconds that the loop was busy, and its slices in milliseconds."""
    ordered = np.array(slices or [0.0]) * 1e3
    return {
        "loop_busy": round(float(ordered.sum()) / 1e3 / wall, 4),
        "slice_longest_ms": round(float(ordered.max()), 3),
        "slice_p99_ms": round(float(np.percentile(ordered, 99)), 3),
        "slices": len(slices),
    }


def find_opener(kernels: Sequence[Kernel], steps: int, opens: str = OPENS) -> str | None:
    """The name of the kernel that begins each decode step; None when nothing fits. `kernels` are in order of start."""
    counts = Counter(kernel.name for kernel in kernels)
    named = [name for name in counts if re.search(opens, name)]
    if named:
        return max(named, key=lambda name: counts[name])
    idle: dict[str, float] = defaultdict(float)
    latest = kernels[0].end if kernels else 0.0
    for kernel in kernels:
        idle[kernel.name] += max(0.0, kernel.start - latest)
        latest = max(latest, kernel.end)
    fitting = [name for name, count in counts.items() if abs(count - steps) <= 2]
    return max(fitting, key=lambda name: idle[name], default=None)


def step_gaps(kernels: Sequence[Kernel], opener: str) -> dict[str, Any]:
    """Idle time before each decode step but the first, in microseconds, and what a step takes."""
    gaps, begins = [], []
    latest = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.name == opener:
            if begins:
                gaps.append(max(0.0, kernel.start - latest))
            begins.append(kernel.start)
        latest = max(latest, kernel.end)
    if not gaps:
        return {"opens": opener, "profiled_steps": len(begins)}
    return {
        "opens": opener,
        "profiled_steps": len(begins),
        "profiled_step_ms": round(float(np.median(np.diff(begins))) / 1e3, 3),
        "gap_median_us": round(float(np.median(gaps)), 1),
        "gap_p99_us": round(float(np.percentile(gaps, 99)), 1),
        "gap_max_us": round(max(gaps), 1),
    }


async def stream(engine: AsyncEngine, work: Work) -> None:
    """One reader per request, chunk by chunk."""

    async def reader(prompt: list[int], new_tokens: int) -> None:
        async for _ in engine.generate(input_ids=prompt, gen_config=generation_config(new_tokens)):
            pass

    async with asyncio.TaskGroup() as group:
        for prompt, new_tokens in zip(work.prompts, work.new_tokens, strict=True):
            group.create_task(reader(prompt, new_tokens))


async def decode_only(engine: AsyncEngine, work: Work, selector: TimedSelector) -> dict[str, Any]:
    """Stream `work`; figures from when all prompts are in to shortly before the answers end."""
    before, batch = engine.stats(), len(work.prompts)
    task = asyncio.ensure_future(stream(engine, work))

    def stage() -> tuple[int, int]:
        now = engine.stats()
        return now.prefill_tokens - before.prefill_tokens, now.decode_tokens - before.decode_tokens

    while not task.done() and stage()[0] < work.num_prompt:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
    selector.slices.clear()
    began, decoded = time.perf_counter(), stage()[1]
    while not task.done() and stage()[1] < batch * (work.new_tokens[0] - 4):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.02)
    wall, slices = time.perf_counter() - began, list(selector.slices)
    steps = (stage()[1] - decoded) / batch
    await task
    return {"step_ms": round(wall * 1e3 / steps, 3), "steps": round(steps), **loop_figures(slices, wall)}


async def profile(engine: AsyncEngine, work: Work, opens: str) -> dict[str, Any]:
    """Stream `work` under the profiler: the gaps between its decode steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    # The raw events: building torch's own summary of a hundred thousand of them takes minutes.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        await stream(engine, work)
        torch.cuda.synchronize()
    results: Any = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = [] if results is None else [event for event in results.events() if event.device_type() == DeviceType.CUDA]
    # Nanoseconds since 1970 are too many digits for a float: the first event is 0.
    origin = min((event.start_ns() for event in events), default=0)
    kernels = []
    for event in events:
        if not event.name().startswith(NOT_KERNELS):
            start = event.start_ns() - origin
            kernels.append(Kernel(event.name(), start / 1e3, (start + event.duration_ns()) / 1e3))
    kernels.sort(key=lambda kernel: kernel.start)
    opener = find_opener(kernels, work.new_tokens[0] - 1, opens)
    if opener is None:
        return {"opens": None, "kernels": len(kernels)}
    return step_gaps(kernels, opener)


async def measure(engine: AsyncEngine, arguments: argparse.Namespace, selector: TimedSelector) -> None:
    async with engine:
        ids = token_ids(engine.limits.vocab_size)
        for name in arguments.work.split(","):
            batch = batch_of(name)
            if batch is None:
                raise ValueError(f"{name!r} is no fixed batch such as b16")
            work = static(batch, arguments.prompt_len, arguments.new_tokens, seed=5, ids=ids)
            await stream(engine, static(batch, 32, 8, seed=98, ids=ids))
            figures = await decode_only(engine, work, selector)
            emit({"engine": "asyncllm", "work": f"cpu_{name}", **figures}, arguments.json)
            if engine.limits.device.startswith("cuda"):
                short = static(batch, arguments.prompt_len, min(PROFILED_TOKENS, arguments.new_tokens), seed=6, ids=ids)
                gaps = await profile(engine, short, arguments.opens)
                emit({"engine": "asyncllm", "work": f"gap_{name}", **gaps}, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--work", default="b1,b16,b256", help="fixed batches (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=129, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--opens", default=OPENS, metavar="REGEX", help="first kernel of a step (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    # The profiler's library stays loaded between two profiles: graphs captured under it may refer to it.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    engine = AsyncEngine(arguments.model, engine_config(arguments.model, arguments.config))
    selector = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(measure(engine, arguments, selector))


if __name__ == "__main__":
    main()
