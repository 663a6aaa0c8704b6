"""Ten times too much to do: what a server still answers in time, and whom.

    python bench/overload.py
    python bench/overload.py --queues 16,0 --seconds 60 --json FILE

The server, in a process of its own, is ours over `asyncllm.testing.FakeEngine`, whose steps take --step-ms whatever is
in them: so the figures are about scheduling and HTTP, and not about a processor that a model would share with them.
First its capacity: twice as many streams as it has rows, each asking again when it is answered. Then requests arrive
at random (Poisson) at --factor times that rate, each with a `timeout`, once for every bound of the queue
(`max_queued_requests`; 0: none). Nobody asks twice. The keys:

    goodput_tok_s   tokens per second of the answers that were whole before their timeout
    ratio           that, to the capacity
    ttft_p99_ms     first token of these answers
    refused         429 with Retry-After; `refused_p99_ms` is how long that took
    expired         timeout over, before or in the answer

Then the same again with quality of service, at one bound: three users of a group by their quotas, and one of a group
before them who asks at a tenth of the capacity. `shares` are of the tokens of whole answers, `boss_` is the latter's,
alone and beside the others. The lengths of answers are drawn from --tokens / 2 to --tokens * 3 / 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop
from streams import raise_file_limit, served
from table import emit

from asyncllm import EngineConfig
from asyncllm.testing import FakeEngine

QUOTAS = {"ann": 60, "bob": 30, "default": 10}
BOSS = "boss"
PROMPT = "Say something."
BLOCK_SIZE = 64


class Asked(NamedTuple):
    """One request of an open loop and what became of it. Times in seconds from its beginning."""

    user: str | None
    tokens: int
    began: float
    """On the clock of the run."""
    status: int
    """200 only for a whole answer; else that of the response, or 504 for a stream that broke off."""
    first: float
    last: float


def serve(arguments: argparse.Namespace, queue: int, qos: bool, connection: Connection) -> None:
    """The main function of a server's process: sends its port, and ends when anything is received."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            policy = Path(folder) / "qos.json"
            policy.write_text(json.dumps(quality_of_service()), encoding="utf-8")
            engine = FakeEngine(
                "x" * 4096,
                EngineConfig(
                    max_batch_size=arguments.rows,
                    enable_prefix_caching=False,
                    max_queued_requests=queue,
                    qos_config_path=str(policy) if qos else None,
                ),
                delay_per_token=arguments.step_ms / 1000,
                num_slots=2 * arguments.rows,  # as on a device
                num_blocks=arguments.rows * (2 * arguments.tokens // BLOCK_SIZE + 3),
                block_size=BLOCK_SIZE,
            )
            async with served(engine) as port:
                connection.send(port)
                ended = asyncio.Event()
                asyncio.get_running_loop().add_reader(connection.fileno(), ended.set)
                await ended.wait()

    raise_file_limit()
    uvloop.run(main())


def quality_of_service() -> dict[str, Any]:
    """What the file of groups and quotas holds."""
    groups: dict[str, Mapping[str, int]] = {"Gold": {BOSS: 100}, "Silver": QUOTAS}
    return {
        "enable_user_qos": True,
        "user_groups": list(groups),
        "user_group_map": {
            name: [{"id": user, "quota_pct": quota} for user, quota in users.items()] for name, users in groups.items()
        },
    }


@contextmanager
def server(arguments: argparse.Namespace, queue: int, *, qos: bool = False) -> Iterator[str]:
    """A server in a process of its own. Yields its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(arguments, queue, qos, there), daemon=True)
    process.start()
    there.close()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
        here.send(None)
    finally:
        process.join(timeout=30)
        process.kill()


class Load:
    """Requests to one server."""

    def __init__(self, url: str, timeout: float, tokens: int, seed: int = 1) -> None:
        self._url = f"{url}/v1/completions"
        self._timeout = timeout
        self._tokens = tokens
        self._rng = random.Random(seed)
        self.asked: list[Asked] = []
        self._start = time.perf_counter()

    def new_tokens(self) -> int:
        """The length of the next answer."""
        return self._rng.randint(self._tokens // 2, self._tokens * 3 // 2)

    async def ask(self, http: aiohttp.ClientSession, tokens: int, user: str | None = None) -> None:
        """Send one request and read what comes."""
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "timeout": self._timeout}
        if user is not None:
            body["user_id"] = user
        began, first, data = time.perf_counter(), 0.0, b""
        async with http.post(self._url, json=body) as response:
            async for piece in response.content.iter_any():
                first = first or time.perf_counter()
                data += piece
            status = response.status
        last = time.perf_counter()
        if status == 200 and b'data: {"error"' in data:
            status = 504
        assert status != 200 or data.endswith(b"data: [DONE]\n\n"), data[-200:]
        self.asked.append(Asked(user, tokens, began - self._start, status, first - began, last - began))

    async def closed(self, streams: int, seconds: float) -> None:
        """Keep so many streams open for so long."""

        async def client(http: aiohttp.ClientSession) -> None:
            while time.perf_counter() - self._start < seconds:
                await self.ask(http, self.new_tokens())

        self._start = time.perf_counter()
        async with connections() as http:
            await asyncio.gather(*(client(http) for _ in range(streams)))

    async def open(self, rates: Mapping[str | None, float], seconds: float) -> None:
        """Ask at random times, each user at its rate per second, whether or not others have been answered."""
        self._start = time.perf_counter()
        async with connections() as http, asyncio.TaskGroup() as group:
            for user, rate in rates.items():
                group.create_task(self._arrivals(http, group, user, rate, seconds))

    async def _arrivals(
        self, http: aiohttp.ClientSession, group: asyncio.TaskGroup, user: str | None, rate: float, seconds: float
    ) -> None:
        due = 0.0
        while (due := due + self._rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, self._start + due - time.perf_counter()))
            group.create_task(self.ask(http, self.new_tokens(), user))

    def ended(self, begin: float, end: float) -> list[Asked]:
        """Those that ended within this part of the run."""
        return [each for each in self.asked if begin <= each.began + each.last < end]


def connections() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False
    )


def goodput(asked: Sequence[Asked], seconds: float) -> float:
    """Tokens per second of the answers that were whole in time."""
    return sum(each.tokens for each in asked if each.status == 200) / seconds


def p99_ms(seconds: Sequence[float]) -> float | None:
    return round(1000 * float(np.percentile(seconds, 99)), 1) if seconds else None


def both_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {f"p{each}": round(1000 * float(np.percentile(seconds, each)), 1) for each in (50, 99)} if seconds else {}


def figures(load: Load, begin: float, end: float, capacity: float) -> dict[str, Any]:
    """Of what ended in this part of an open loop."""
    asked = load.ended(begin, end)
    tokens = goodput(asked, end - begin)
    statuses = Counter(each.status for each in asked)
    return {
        "goodput_tok_s": round(tokens, 1),
        "ratio": round(tokens / capacity, 3),
        "ttft_p99_ms": p99_ms([each.first for each in asked if each.status == 200]),
        "answered": statuses[200],
        "refused": statuses[429],
        "refused_p99_ms": p99_ms([each.last for each in asked if each.status == 429]),
        "expired": statuses[504],
    }


def measure_capacity(arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens and requests per second of a server that always has enough to do, and answers all in time."""
    with server(arguments, 0) as url:
        load = Load(url, 3600.0, arguments.tokens)
        uvloop.run(load.closed(2 * arguments.rows, arguments.warm_up + arguments.seconds))
    asked = load.ended(arguments.warm_up, arguments.warm_up + arguments.seconds)
    assert all(each.status == 200 for each in asked), Counter(each.status for each in asked)
    return goodput(asked, arguments.seconds), len(asked) / arguments.seconds


def overload(
    arguments: argparse.Namespace, queue: int, rates: Mapping[str | None, float], *, qos: bool = False
) -> Load:
    """An open loop against a fresh server with this bound of its queue."""
    with server(arguments, queue, qos=qos) as url:
        load = Load(url, arguments.timeout, arguments.tokens)
        uvloop.run(load.open(rates, arguments.warm_up + arguments.seconds))
    return load


def measure_users(arguments: argparse.Namespace, queue: int, capacity: float, rate: float) -> dict[str, Any]:
    """Shares of users by quota, and the first group's times, alone and beside the others."""
    begin, end = arguments.warm_up, arguments.warm_up + arguments.seconds
    mine: dict[str | None, float] = {BOSS: rate / 10}
    alone = overload(arguments, queue, mine, qos=True).ended(begin, end)
    others: dict[str | None, float] = dict.fromkeys(QUOTAS, arguments.factor * rate / len(QUOTAS))
    load = overload(arguments, queue, mine | others, qos=True)
    asked = load.ended(begin, end)
    used = {user: goodput([each for each in asked if each.user == user], 1.0) for user in QUOTAS}
    boss = [each for each in asked if each.user == BOSS]
    return {
        **figures(load, begin, end, capacity),
        "shares": {user: round(100 * tokens / max(1.0, sum(used.values())), 1) for user, tokens in used.items()},
        "quotas": QUOTAS,
        "boss_answered": f"{sum(each.status == 200 for each in boss)} of {len(boss)}",
        "boss_ttft_ms": both_ms([each.first for each in boss if each.status == 200]),
        "boss_alone_ttft_ms": both_ms([each.first for each in alone if each.status == 200]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="sequences at once (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="milliseconds per step (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="mean tokens of an answer (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds of each request (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=10.0, help="load, to the capacity (default: %(default)s)")
    parser.add_argument("--queues", default="16,128,0", help="bounds, comma-separated (default: %(default)s)")
    parser.add_argument("--qos-queue", type=int, default=128, help="bound with users; -1: leave out (default: 128)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds before it (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    raise_file_limit()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    capacity, rate = measure_capacity(arguments)
    found = {"capacity_tok_s": round(capacity, 1), "requests_s": round(rate, 1)}
    emit({"engine": "asyncllm", "work": "capacity", **found}, arguments.json)
    for queue in map(int, arguments.queues.split(",")):
        print(f"queue of {queue or 'any length'}", file=sys.stderr)
        load = overload(arguments, queue, {None: arguments.factor * rate})
        found = figures(load, arguments.warm_up, arguments.warm_up + arguments.seconds, capacity)
        emit({"engine": "asyncllm", "work": f"overload_q{queue}", **found}, arguments.json)
    if arguments.qos_queue >= 0:
        found = measure_users(arguments, arguments.qos_queue, capacity, rate)
        emit({"engine": "asyncllm", "work": f"overload_users_q{arguments.qos_queue}", **found}, arguments.json)


if __name__ == "__main__":
    main()
