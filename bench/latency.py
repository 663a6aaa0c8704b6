"""Time to first token and time per token of streamed answers, with so many readers at once, inside the process.

    python bench/latency.py --model FOLDER
    python bench/latency.py --model FOLDER --levels 1:8,256:1000 --config '{"max_batch_size": 128}' --json FILE

A level C:N keeps C requests open until N are answered: as one ends, its reader asks the next. Requests have the
lognormal lengths of `workloads.mixed`, drawn anew per level, or those of --prompt-len and --new-tokens. The keys are
those of `vllm bench serve`, in milliseconds, with its definitions:

    ttft    from the call of generate() to the first chunk
    itl     between two chunks of an answer; a reader who falls behind gets several tokens in one chunk
    tpot    (last chunk - first chunk) / (tokens - 1), of each answer of at least 2 tokens
    e2el    from the call of generate() to the last chunk
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from engines import engine_config, generation_config
from table import emit
from tqdm import tqdm
from workloads import Work, mixed, static, token_ids

from asyncllm import AsyncEngine

LEVELS = "1:8,16:64,64:300,256:1000"
PERCENTILES = (50, 99)


@dataclass
class Answered:
    """When the chunks of one answer came. Times in seconds on one clock."""

    prompt_tokens: int
    asked: float
    chunk_times: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.asked

    @property
    def e2el(self) -> float:
        return self.chunk_times[-1] - self.asked

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / (self.tokens - 1)


async def read(engine: AsyncEngine, prompt: list[int], new_tokens: int) -> Answered:
    """Ask, and note when each chunk with tokens comes."""
    answered = Answered(len(prompt), asked=time.perf_counter())
    async for chunk in engine.generate(input_ids=prompt, gen_config=generation_config(new_tokens)):
        if chunk.token_ids:
            answered.chunk_times.append(time.perf_counter())
            answered.tokens += len(chunk.token_ids)
    assert answered.tokens == new_tokens, f"{answered.tokens} of {new_tokens} tokens came"
    return answered


async def run_level(engine: AsyncEngine, work: Work, concurrency: int) -> tuple[list[Answered], float]:
    """Answer all requests of `work`, at most `concurrency` at once; their times, and the seconds of it all."""
    requests: Iterator[tuple[list[int], int]] = iter(zip(work.prompts, work.new_tokens, strict=True))
    done: list[Answered] = []
    with tqdm(total=len(work.prompts), desc=f"c{concurrency}", file=sys.stderr, leave=False) as progress:

        async def reader() -> None:
            for prompt, new_tokens in requests:
                done.append(await read(engine, prompt, new_tokens))
                progress.update()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(reader())
        return done, time.perf_counter() - start


def summarize(answered: Sequence[Answered], duration: float, concurrency: int) -> dict[str, Any]:
    """The figures of one level, keyed as in `vllm bench serve`."""
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    tokens = sum(each.tokens for each in answered)
    chunks = sum(len(each.chunk_times) for each in answered)
    spans = {
        "ttft": [each.ttft for each in answered],
        "tpot": [each.tpot for each in answered if each.tokens > 1],
        "itl": [after - before for each in answered for before, after in pairwise(each.chunk_times)],
        "e2el": [each.e2el for each in answered],
    }
    figures: dict[str, Any] = {
        "engine": "asyncllm",
        "work": f"stream_c{concurrency}",
        "max_concurrency": concurrency,
        "completed": len(answered),
        "duration": round(duration, 3),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": round(len(answered) / duration, 2),
        "output_throughput": round(tokens / duration, 1),
        "total_token_throughput": round((prompt_tokens + tokens) / duration, 1),
        "chunks_per_token": round(chunks / tokens, 3),
    }
    for name, values in spans.items():
        milliseconds = np.array(values or [np.nan]) * 1e3
        figures[f"mean_{name}_ms"] = round(float(milliseconds.mean()), 3)
        figures[f"median_{name}_ms"] = round(float(np.median(milliseconds)), 3)
        for percentile in PERCENTILES:
            figures[f"p{percentile}_{name}_ms"] = round(float(np.percentile(milliseconds, percentile)), 3)
    return figures


def parse_levels(text: str) -> list[tuple[int, int]]:
    """ "1:8,16:64" -> [(1, 8), (16, 64)]; every number is at least 1."""
    levels = [(int(concurrency), int(count)) for concurrency, count in (each.split(":") for each in text.split(","))]
    if any(number < 1 for level in levels for number in level):
        raise ValueError(f"levels are CONCURRENCY:REQUESTS, both at least 1, not {text!r}")
    return levels


def draw(count: int, seed: int, prompt_len: int | None, new_tokens: int | None, ids: range) -> Work:
    """`count` requests; fixed lengths replace the lognormal ones of prompts, answers, or both."""
    work = mixed(count, seed=seed, ids=ids)
    if prompt_len:
        work = Work(static(count, prompt_len, 1, seed=seed, ids=ids).prompts, work.new_tokens)
    return Work(work.prompts, [new_tokens] * count) if new_tokens else work


async def measure(engine: AsyncEngine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    async with engine:
        ids = token_ids(engine.limits.vocab_size)
        levels = parse_levels(arguments.levels)
        largest = max(concurrency for concurrency, _ in levels)
        await run_level(engine, static(2 * largest, 32, 16, seed=98, ids=ids), largest)
        for seed, (concurrency, count) in enumerate(levels, start=1):
            work = draw(count, seed, arguments.prompt_len, arguments.new_tokens, ids)
            result = summarize(*await run_level(engine, work, concurrency), concurrency)
            results.append(result)
            emit(result, arguments.json)
    return results


def format_table(results: Sequence[dict[str, Any]]) -> str:
    keys = (
        "output_throughput",
        "mean_ttft_ms",
        "p99_ttft_ms",
        "p50_tpot_ms",
        "p99_tpot_ms",
        "p50_itl_ms",
        "p99_itl_ms",
    )
    rows = [["concurrency (requests)", *keys], ["---"] * (len(keys) + 1)]
    for result in results:
        name = f"{result['max_concurrency']} ({result['completed']})"
        rows.append([name, *(f"{result[key]:,.2f}" for key in keys)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--levels", default=LEVELS, help="CONCURRENCY:REQUESTS,... (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--prompt-len", type=int, help="tokens of every prompt, instead of lognormal lengths")
    parser.add_argument("--new-tokens", type=int, help="tokens of every answer, instead of lognormal lengths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    engine = AsyncEngine(arguments.model, engine_config(arguments.model, arguments.config))
    results = asyncio.run(measure(engine, arguments))
    print(format_table(results))


if __name__ == "__main__":
    main()
