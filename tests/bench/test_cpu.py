"""bench/cpu.py: the time a loop is busy, and the gaps between the decode steps of a list of kernels."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from cpu import Kernel, TimedSelector, decode_only, find_opener, loop_figures, step_gaps
from engines import engine_config
from workloads import static

from asyncllm import AsyncEngine


def steps(count: int, opener: str = "prepare_decode_kernel", gap: float = 7.0) -> list[Kernel]:
    """Steps of three kernels, of which the second overlaps the first, with `gap` microseconds before each."""
    kernels, now = [], 100.0
    for _ in range(count):
        now += gap
        kernels += [
            Kernel(opener, now, now + 10),
            Kernel("attend", now + 8, now + 30),
            Kernel("short", now + 9, now + 12),
        ]
        now += 30
    return kernels


def test_a_gap_counts_from_the_latest_end_of_all_kernels_before() -> None:
    figures = step_gaps(steps(5), "prepare_decode_kernel")
    assert figures["profiled_steps"] == 5
    assert (figures["gap_median_us"], figures["gap_p99_us"], figures["gap_max_us"]) == (7.0, 7.0, 7.0)
    assert figures["profiled_step_ms"] == pytest.approx(0.037)


def test_one_late_step_shows_in_the_worst_gap_only() -> None:
    kernels = steps(40)
    late = [Kernel(name, start + 500, end + 500) for name, start, end in kernels[60:]]
    figures = step_gaps(kernels[:60] + late, "prepare_decode_kernel")
    assert figures["gap_median_us"] == 7.0
    assert figures["gap_max_us"] == 507.0


def test_overlapping_steps_have_no_gap() -> None:
    assert step_gaps(steps(4, gap=-1.0), "prepare_decode_kernel")["gap_max_us"] == 0.0


def test_the_opener_is_found_by_name_or_else_by_the_idle_time_before_it() -> None:
    assert find_opener(steps(9), 9) == "prepare_decode_kernel"
    other = [Kernel("embed", 0.0, 5.0), *steps(9, opener="gather")]
    assert find_opener(other, 9) == "gather"
    assert find_opener(other, 30) is None
    assert find_opener([], 3) is None
    assert find_opener(steps(9), 9, opens="^att") == "attend"


def test_loop_figures() -> None:
    figures = loop_figures([0.001, 0.003, 0.001], wall=0.05)
    assert figures["loop_busy"] == 0.1
    assert figures["slice_longest_ms"] == 3.0
    assert figures["slices"] == 3
    assert loop_figures([], wall=1.0)["loop_busy"] == 0.0


def test_the_selector_times_callbacks_and_not_waits() -> None:
    selector = TimedSelector()

    async def work() -> float:
        selector.slices.clear()
        began = time.perf_counter()
        for _ in range(4):
            await asyncio.sleep(0.02)
            until = time.perf_counter() + 0.01
            while time.perf_counter() < until:
                pass
        return time.perf_counter() - began

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        wall = runner.run(work())
    busy = sum(selector.slices)
    assert 0.04 <= busy <= wall - 0.06
    assert max(selector.slices) >= 0.01


def test_the_loop_is_watched_while_all_requests_decode(tiny_checkpoint: Path) -> None:
    selector = TimedSelector()
    work = static(3, 20, 40, seed=0, ids=range(64, 300))

    config = engine_config(str(tiny_checkpoint), '{"num_gpu_blocks": 40}')

    async def run() -> dict[str, float]:
        async with AsyncEngine(str(tiny_checkpoint), config) as engine:
            return await decode_only(engine, work, selector)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        figures = runner.run(run())
    assert list(figures) == ["step_ms", "steps", "loop_busy", "slice_longest_ms", "slice_p99_ms", "slices"]
    assert 25 <= figures["steps"] <= 40
    assert 0 < figures["loop_busy"] < 1
