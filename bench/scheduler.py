"""What a step costs the event loop, without a model: schedule, update, deliver, and the engine loop as a whole.

    python bench/scheduler.py [--rows 256] [--waiting 10 10000] [--steps 400] [--json]

Prefix caching is on and blocks have 64 tokens. All rows decode, and all but `max_batch_size` requests wait. Figures are
medians in microseconds per step; `turn` is everything the loop does for a step, with a device that costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from itertools import pairwise
from typing import Any

from asyncllm.engine.loop.engine_loop import EngineLoop
from asyncllm.engine.requests.answer import Answer
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request
from asyncllm.protocol import Batch, Limits, SamplingParams, StepOutput
from asyncllm.testing import ByteTokenizer
from asyncllm.text.detokenizer import Detokenizer

BLOCK_SIZE = 64
PROMPT_LEN = 40
VOCAB = 258


def limits(rows: int) -> Limits:
    return Limits(
        num_blocks=rows * 64, block_size=BLOCK_SIZE, max_position=8192, vocab_size=VOCAB, hidden_size=1, num_slots=rows
    )


def new_scheduler(rows: int) -> Scheduler:
    return Scheduler(
        limits(rows),
        max_batch_size=rows,
        prefill_budget=8192,
        prefill_interval=1,
        prefix_caching=True,
        swapping=False,
    )


def new_request(
    number: int, tokenizer: ByteTokenizer, prompt_len: int = PROMPT_LEN, max_new_tokens: int = 4000
) -> Request:
    """A streamed request, which runs for longer than this file's measurements."""
    return Request(
        id=number,
        prompt_ids=[(number + position) % 256 for position in range(prompt_len)],
        params=[SamplingParams(temperature=0.0)],
        stop_ids=frozenset({257}),
        max_new_tokens=max_new_tokens,
        delivery=Delivery(streaming=True),
        answers=[
            Answer(
                Detokenizer(tokenizer, skip_special_tokens=True),
                stop_words=None,
                hidden_ids=frozenset({257}),
                include_stop=False,
            )
        ],
    )


def run_step(batch: Batch) -> StepOutput:
    """A device that costs next to nothing: the same letter for every row."""
    slots = batch.decode + [row.slot for row in batch.prefill if row.sample]
    return StepOutput(step=batch.step, slots=slots, tokens=[97] * len(slots))


class InstantExecutor:
    """Steps are complete when they are submitted."""

    isolated = False

    def __init__(self, rows: int) -> None:
        self.limits = limits(rows)
        self.num_steps = 0
        self.submitted: list[float] = []

    def watch(self, *_: Any) -> None:
        pass

    async def start(self) -> Limits:
        return self.limits

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        future.set_result(run_step(batch))
        self.num_steps += 1
        self.submitted.append(time.perf_counter())
        return future

    async def close(self) -> None:
        pass


def measure_scheduler(rows: int, waiting: int, steps: int) -> dict[str, float]:
    """Medians of one call of schedule() and of update(), in microseconds, with one more step in flight."""
    scheduler, tokenizer = new_scheduler(rows), ByteTokenizer()
    for number in range(rows + waiting):
        scheduler.add(new_request(number, tokenizer))
    first = scheduler.schedule()
    while scheduler.num_running < rows:
        assert first is not None
        following = scheduler.schedule()
        scheduler.update(run_step(first))
        first = following
    schedule_times, update_times = [], []
    for _ in range(steps):
        start = time.perf_counter()
        following = scheduler.schedule()
        between = time.perf_counter()
        assert first is not None
        output = run_step(first)
        before = time.perf_counter()
        advanced = scheduler.update(output)
        end = time.perf_counter()
        assert len(advanced) == rows
        schedule_times.append(between - start)
        update_times.append(end - before)
        first = following
    return {
        "schedule_us": statistics.median(schedule_times) * 1e6,
        "update_us": statistics.median(update_times) * 1e6,
    }


async def measure_loop(rows: int, waiting: int, steps: int) -> dict[str, float]:
    """Medians of delivering a step to `rows` readers that read nothing, and of a whole turn of the engine loop."""
    executor, tokenizer = InstantExecutor(rows), ByteTokenizer()
    loop = EngineLoop(new_scheduler(rows), executor, name="bench")
    deliver_times: list[float] = []
    deliver = loop._open.deliver

    def timed(advanced: Any) -> bool:
        start = time.perf_counter()
        woken = deliver(advanced)
        deliver_times.append(time.perf_counter() - start)
        return woken

    loop._open.deliver = timed  # type: ignore[method-assign]
    for number in range(rows + waiting):
        loop.open(new_request(number, tokenizer))
    while loop.scheduler.num_running < rows or executor.num_steps < 10:  # noqa: ASYNC110 - each turn is a step
        await asyncio.sleep(0)
    deliver_times.clear()
    executor.submitted.clear()
    while len(executor.submitted) <= steps:  # noqa: ASYNC110 - each turn is a step
        await asyncio.sleep(0)
    await loop.stop()
    turns = [after - before for before, after in pairwise(executor.submitted)]
    return {
        "deliver_us": statistics.median(deliver_times) * 1e6,
        "turn_us": statistics.median(turns) * 1e6,
    }


def measure(rows: int, waiting: int, steps: int) -> dict[str, float]:
    """All figures for one number of waiting requests."""
    figures = {"rows": float(rows), "waiting": float(waiting), **measure_scheduler(rows, waiting, steps)}
    return figures | asyncio.run(measure_loop(rows, waiting, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    arguments = parser.parse_args()
    results = [measure(arguments.rows, waiting, arguments.steps) for waiting in arguments.waiting]
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "block_size": BLOCK_SIZE, "results": results}, indent=2))
        return
    print(f"{'rows':>6} {'waiting':>8} {'schedule':>9} {'update':>9} {'deliver':>9} {'turn':>9}   (us per step)")
    for result in results:
        times = " ".join(f"{result[name]:9.0f}" for name in ("schedule_us", "update_us", "deliver_us", "turn_us"))
        print(f"{result['rows']:6.0f} {result['waiting']:8.0f} {times}")


if __name__ == "__main__":
    main()
