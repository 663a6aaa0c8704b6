"""A server under load: streams of `/v1/completions` from client processes of their own, so many at once.

    python bench/serve.py --model FOLDER
    python bench/serve.py --model FOLDER --levels 1:8,256:1000 --json FILE -- --max-batch-size 256
    python bench/serve.py --url http://127.0.0.1:8000 --levels 64:300

Without --url, `asyncllm serve` is started for the model on a free port, with the flags after `--`. A level C:N keeps C
streams open until N have ended; prompts are letters drawn at random, and lengths lognormal, as chat logs have them.
The keys are those of `vllm bench serve`, in milliseconds; tpot is (last byte - first byte) / (tokens - 1) per answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop
from table import emit
from tqdm import tqdm
from workloads import mixed

LEVELS = "1:8,16:64,64:300,256:1000"
CLIENTS = 4
"""Processes that read streams, from 16 streams on: one alone cannot read as fast as a server writes."""
START_SECONDS = 300


class Answered(NamedTuple):
    """One stream, in seconds from its request."""

    first: float
    last: float
    tokens: int
    events: int
    """Those with text."""


def jobs(count: int, seed: int) -> list[tuple[str, int]]:
    """(prompt, new tokens) of each request, with the lengths of `workloads.mixed`."""
    rng, work = random.Random(seed), mixed(count, seed=seed)
    letters = ("".join(rng.choices(string.ascii_letters, k=len(prompt))) for prompt in work.prompts)
    return list(zip(letters, work.new_tokens, strict=True))


async def read_streams(url: str, model: str, streams: int, work: Sequence[tuple[str, int]]) -> list[Answered]:
    """Ask `work`, with `streams` open at once. Raises RuntimeError for an answer that is not whole."""
    waiting = iter(work)
    answered: list[Answered] = []

    async def reader(http: aiohttp.ClientSession) -> None:
        for prompt, tokens in waiting:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            asked, first, data = time.perf_counter(), 0.0, b""
            async with http.post(f"{url}/v1/completions", json={**body, "temperature": 0}) as response:
                async for piece in response.content.iter_any():
                    first = first or time.perf_counter()
                    data += piece
                whole = data.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in data
                if response.status != 200 or not whole:
                    raise RuntimeError(f"status {response.status}: {data[-300:]!r}")
            # The last two are the finish reason, which has no text, and [DONE].
            events = data.count(b"data: ") - 2
            answered.append(Answered(first - asked, time.perf_counter() - asked, tokens, events))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*(reader(http) for _ in range(streams)))
    return answered


def client(url: str, model: str, streams: int, work: Sequence[tuple[str, int]]) -> list[Answered]:
    """The main function of a client's process."""
    return uvloop.run(read_streams(url, model, streams, work))


def measure(url: str, model: str, streams: int, count: int, seed: int) -> dict[str, Any]:
    """The figures of one level."""
    processes = CLIENTS if streams >= 16 else 1
    work = jobs(count, seed)
    shares = [(url, model, streams // processes, work[index::processes]) for index in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(abs, range(processes))  # started, and imported what they need
        began = time.perf_counter()
        answered = [each for share in pool.starmap(client, shares) for each in share]
        seconds = time.perf_counter() - began
    tokens = sum(each.tokens for each in answered)
    ttft = np.array([each.first for each in answered]) * 1000
    tpot = np.array([(each.last - each.first) / (each.tokens - 1) for each in answered if each.tokens > 1]) * 1000
    return {
        "engine": "asyncllm",
        "work": f"serve_c{streams}",
        "requests": len(answered),
        "duration": round(seconds, 2),
        "request_throughput": round(len(answered) / seconds, 2),
        "output_throughput": round(tokens / seconds, 1),
        "mean_ttft_ms": round(float(ttft.mean()), 1),
        "p99_ttft_ms": round(float(np.percentile(ttft, 99)), 1),
        "p50_tpot_ms": round(float(np.percentile(tpot, 50)), 2),
        "p99_tpot_ms": round(float(np.percentile(tpot, 99)), 2),
        "chunks_per_token": round(sum(each.events for each in answered) / tokens, 3),
    }


@contextmanager
def started(model: str, flags: Sequence[str]) -> Iterator[str]:
    """A server of our own on a free port; its address once it is ready. Raises RuntimeError when it ends first."""
    command = [sys.executable, "-m", "asyncllm", "serve", "api_server", model, "--server-port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if " at http" in line:
                yield line.partition(" at ")[2].partition("/v1")[0]
                return
        raise RuntimeError("the server ended: " + "".join(lines[-5:]))
    finally:
        server.terminate()
        try:
            server.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()


def model_name(url: str) -> str:
    """The model that a server serves."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=START_SECONDS) as response:
        name: str = json.load(response)["data"][0]["id"]
        return name


def run(url: str, levels: str, report: Path | None) -> None:
    """Warm up, then measure each level."""
    model = model_name(url)
    measure(url, model, 16, 32, seed=0)
    for level in tqdm(levels.split(","), unit="level", file=sys.stderr, leave=False):
        streams, _, count = level.partition(":")
        emit(measure(url, model, int(streams), int(count), seed=1), report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--levels", default=LEVELS, help="STREAMS:REQUESTS, comma-separated (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append the figures to this file")
    parser.add_argument("flags", nargs="*", help="after --: flags of `asyncllm serve`")
    arguments = parser.parse_args()
    if arguments.url is not None:
        run(arguments.url.rstrip("/"), arguments.levels, arguments.json)
    else:
        with started(arguments.model, arguments.flags) as url:
            run(url, arguments.levels, arguments.json)


if __name__ == "__main__":
    main()
