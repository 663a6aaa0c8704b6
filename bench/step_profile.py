"""Where a step's time goes on a GPU: each kernel's own time in a decode step, and in the prompts before it.

    python bench/step_profile.py --model FOLDER --work b1,b256 [--prompt-len 512] [--new-tokens 33] [--config JSON]

Each work runs with answers of one token and with whole ones, under CUPTI's records; the difference, divided by the
steps, is the decode step, with its share of the steps in which the last prompts come in. A kernel's own time begins
where the one before it has ended: a kernel that is launched early waits within its own records. `idle` is the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from engines import answer, engine_config
from torch.profiler import ProfilerActivity, profile
from workloads import Work, batch_of, plan, token_ids

from asyncllm import AsyncEngine
from asyncllm.locate import locate
from asyncllm.text.tokenizer import Tokenizer

IDLE = "idle"
NAME_LENGTH = 90


class Record(NamedTuple):
    """A kernel or a copy, in nanoseconds."""

    begin: int
    end: int
    name: str


class Times(NamedTuple):
    own_ns: Counter[str]
    launches: Counter[str]

    def less(self, other: Times, parts: int) -> list[tuple[str, float, float]]:
        """Return (name, µs, launches) of what these have more than others, divided by `parts`, the longest first."""
        rows = [
            (name, (own - other.own_ns[name]) / parts / 1e3, (self.launches[name] - other.launches[name]) / parts)
            for name, own in self.own_ns.items()
        ]
        return sorted(rows, key=lambda row: -row[1])


def own_times(records: Iterable[Record]) -> Times:
    """Attribute all time between the first record's begin and the last one's end to one record each, or to none."""
    own: Counter[str] = Counter({IDLE: 0})
    launches: Counter[str] = Counter()
    last = None
    for begin, end, name in sorted(records, key=lambda record: (record.end, record.begin)):
        if last is None:
            last = begin
        own[IDLE] += max(0, begin - last)
        last = max(last, begin)
        own[name] += max(0, end - last)
        launches[name] += 1
        last = max(last, end)
    return Times(own, launches)


async def recorded(engine: AsyncEngine, work: Work) -> tuple[Times, float]:
    """Return the own times of all that a work runs on the GPU, and its seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = await answer(engine, work)
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    on_device = [each for each in events if str(each.device_type()).endswith("CUDA")]
    records = [Record(each.start_ns(), each.start_ns() + each.duration_ns(), each.name()) for each in on_device]
    return own_times(records), seconds


def report(title: str, rows: Sequence[tuple[str, float, float]], top: int) -> None:
    print(f"\n{title}: {sum(row[1] for row in rows) / 1e3:.3f} ms")
    for name, microseconds, launches in rows[:top]:
        print(f"{microseconds:10.1f} us {launches:8.1f}  {name[:NAME_LENGTH]}")


async def measure(arguments: argparse.Namespace) -> None:
    ids = token_ids(Tokenizer.from_folder(locate(arguments.model)).vocab_size)
    async with AsyncEngine(arguments.model, engine_config(arguments.model, arguments.config)) as engine:
        for name in arguments.work.split(","):
            works = plan(name, prompt_len=arguments.prompt_len, new_tokens=arguments.new_tokens, ids=ids)
            for work in (*works.first[:1], works.whole[0]):
                await answer(engine, work)
            if not works.first:
                times, seconds = await recorded(engine, works.whole[1])
                report(f"{name}, {seconds * 1e3:.1f} ms by the clock", times.less(own_times([]), 1), arguments.top)
                continue
            first, first_seconds = await recorded(engine, works.first[1])
            whole, seconds = await recorded(engine, works.whole[1])
            steps = works.whole[1].new_tokens[0] - 1
            by_clock = 1e3 * (seconds - first_seconds) / steps
            report(f"{name}, a decode step, {by_clock:.3f} ms by the clock", whole.less(first, steps), arguments.top)
            report(f"{name}, all prompts", first.less(own_times([]), 1), arguments.top)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, bundled name or hub id")
    parser.add_argument("--work", default="b1,b16,b256", help="prefill, and b with any number (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, help="tokens per prompt, instead of the work's own")
    parser.add_argument("--new-tokens", type=int, default=33, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--top", type=int, default=20, help="kernels to print (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    for name in parsed.work.split(","):
        if name != "prefill" and batch_of(name) is None:
            parser.error(f"argument --work: {name!r} has no steps of one size; take prefill, b1 or b with any number")
    return parsed


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("bench/step_profile.py reads the records of a GPU, and torch finds none here.")
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
