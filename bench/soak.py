"""A soak of the whole server: mixed load with clients who leave and requests that are wrong, then an audit.

    python bench/soak.py
    python bench/soak.py --minutes 240 --seed 7 --model FOLDER --output soak.json

A server process of its own (`soak_server.py`) has little memory, so that sequences are preempted and copied to host
memory and the prefix cache turns over. Clients in this process (`soak_client.py`) send every kind of request
(`soak_requests.py`): 10 % are left at random moments, 5 % are wrong, and steps, tokenizer and answers fail now and
then (`--no-faults`: they do not). The first quarter of the time warms up. The exit code is 1 if one of these fails:

    books        started = finished + failed + cancelled + rejected, the same in the clients', /metrics' and the access
                 log's book, request by request (`soak_books.py`), and in the engine's own
    complaints   a good request that was refused, a bad one that was not, an answer without its end or with another id
    descriptors  as many as after the warm-up
    blocks       none is held when all is over: free + cached = all, on the device and on the host

`rss_slope_mb_h` is a straight line through the server's resident memory after the warm-up, sampled once a second, and
`rss_mb_by_fifths` are the medians of its five parts, which tell growth from settling. `after_warm_up` and `end` are of
a server at rest: its memory, and how much of it objects and malloc's callers hold, which is what a leak would raise.
`abort_to_blocks_ms` is from the client's close() to the server's pool.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from soak_books import Books, Record, read_log, read_metrics
from soak_client import Asking
from soak_requests import LABEL_BASE, draw_requests
from soak_server import Server, Told, started

WARM_UP = 0.25
"""Share of the time."""
PAUSE_S = 0.05
"""Mean time between a client's requests."""
BUSY_PAUSE_S = 1.0
"""The same after a 429."""
PROGRESS_S = 10.0
SETTLE_S = 60.0
"""Time for the server to come to rest when no client is left."""


class Soak:
    """The clients, and what they have seen."""

    def __init__(self, server: Server, seed: int, clients: int) -> None:
        self.server = server
        self.records: dict[str, Record] = {}
        """By X-Request-Id."""
        self.num_unsent = 0
        """Left before their head was sent: no requests."""
        self.samples: list[tuple[float, float]] = []
        """Monotonic time, and the server's resident memory in MB."""
        self._drawn = [draw_requests(seed, client, clients) for client in range(clients)]
        self._pauses = random.Random(seed)

    async def load(self, seconds: float) -> None:
        """Ask for so long; then every client reads its last answer and closes its connection."""
        end = time.monotonic() + seconds
        watching = asyncio.create_task(self._watch(end))
        try:
            async with asyncio.TaskGroup() as group:
                for client in range(len(self._drawn)):
                    group.create_task(self._client(client, end))
        finally:
            watching.cancel()

    async def _client(self, client: int, end: float) -> None:
        asking = Asking(self.server.url)
        try:
            for asked in self._drawn[client]:
                record = await asking.ask(asked)
                if record is None:
                    self.num_unsent += 1
                else:
                    self.records[asked.id] = record
                busy = record is not None and record.status == 429
                await asyncio.sleep(self._pauses.expovariate(1 / (BUSY_PAUSE_S if busy else PAUSE_S)))
                if time.monotonic() >= end:
                    return
        finally:
            asking.leave()

    async def _watch(self, end: float) -> None:
        for second in itertools.count(1):
            self.samples.append((time.monotonic(), self.server.rss_mb()))
            if second % PROGRESS_S == 0:
                counts = Counter(record.outcome for record in self.records.values())
                told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
                left = max(0.0, end - time.monotonic())
                print(f"{left:5.0f} s left; {told}; {self.samples[-1][1]:.0f} MB", file=sys.stderr, flush=True)
            await asyncio.sleep(1.0)

    async def settled(self) -> Told:
        """Wait until the server rests. -> what it then says of itself."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            told = self.server.told()
            if not told.not_idle and not told.stats["blocks_held"] and not told.stats["host_blocks_held"]:
                return told
            if time.monotonic() > deadline:
                return told
            await asyncio.sleep(0.1)


def slope(samples: list[tuple[float, float]]) -> float:
    """MB per hour of a straight line through the samples; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    times, megabytes = np.array(samples).T
    return float(np.polyfit(times - times[0], megabytes, 1)[0]) * 3600


def abort_times(records: dict[str, Record], back: dict[int, float]) -> list[float]:
    """Milliseconds from a client's leaving to its blocks' return, of the answers that were running then."""
    found = []
    for record in records.values():
        returned = back.get(LABEL_BASE + record.asked.number)
        if record.left_at and returned is not None:
            found.append(1000 * (returned - record.left_at))
    return found


def audit(soak: Soak, told: Told, log: list[tuple[str, int]], metrics: str) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is wrong."""
    books = Books.of(soak.records, log, read_metrics(metrics))
    stats = told.stats
    engine = {name: stats[f"requests_{name}"] for name in ("started", "finished", "cancelled", "failed", "expired")}
    wrong = list(books.imbalances)
    if engine["started"] != sum(engine.values()) - engine["started"]:
        wrong.append(f"the engine's own book does not balance: {engine}")
    complaints = [f"{each.asked.id} ({each.asked.kind}): {each.complaint}" for each in soak.records.values()]
    complaints = [each for each in complaints if not each.endswith(": ")]
    blocks = {
        place: {state: stats[f"{prefix}blocks_{state}"] for state in ("total", "free", "cached", "held")}
        for place, prefix in (("device", ""), ("host", "host_"))
    }
    for place, counts in blocks.items():
        if counts["held"] or counts["free"] + counts["cached"] != counts["total"]:
            wrong.append(f"blocks are not back on the {place}: {counts}")
    if told.not_idle:
        wrong.append(f"the engine is not idle: {told.not_idle}")
    times = abort_times(soak.records, told.back)
    percentiles = {f"p{each}": round(float(np.percentile(times, each)), 1) for each in (50, 99)} if times else {}
    figures = {
        "requests": dict(sorted(Counter(record.asked.kind for record in soak.records.values()).items())),
        "statuses": dict(sorted(Counter(str(status) for _, status in log).items())),
        "left": dict(sorted(Counter(str(each.asked.leaves) for each in soak.records.values() if each.left_at).items())),
        "left_in_the_head_and_so_no_requests": soak.num_unsent,
        "books": books.report() | {"engine": engine},
        "complaints": len(complaints),
        "first_complaints": complaints[:20],
        "abort_to_blocks_ms": {"aborts": len(times), **percentiles},
        "blocks_at_the_end": blocks,
        "faults": told.faults,
        "engine": {
            name: stats[name]
            for name in (
                "steps",
                "sampled_tokens",
                "preemptions",
                "swap_fallbacks",
                "blocks_swapped_out",
                "blocks_swapped_in",
                "cached_tokens",
                "prompt_tokens",
                "requests_refused",
            )
        },
    }
    return figures, wrong + complaints


def at_rest(server: Server, told: Told) -> dict[str, float]:
    """What a server holds that has nothing to do, and has just said so."""
    return {
        "descriptors": server.descriptors(),
        "threads": server.threads(),
        "rss_mb": round(server.rss_mb(), 1),
        "python_blocks": told.python_blocks,
        "heap_mb": round(told.heap_mb, 1),
    }


def run(arguments: argparse.Namespace, log: Path) -> tuple[dict[str, Any], list[str]]:
    """The whole soak. -> figures, and what is wrong."""
    seconds = 60 * arguments.minutes
    with started(arguments.model, log, faults=arguments.faults) as server:
        soak = Soak(server, arguments.seed, arguments.clients)

        async def both() -> tuple[dict[str, float], Told]:
            await soak.load(WARM_UP * seconds)
            begin = at_rest(server, await soak.settled())
            soak.samples.clear()
            await soak.load(seconds - WARM_UP * seconds)
            return begin, await soak.settled()

        begin, told = asyncio.run(both())
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            metrics = response.read().decode()
        deadline = time.monotonic() + SETTLE_S
        while server.descriptors() > begin["descriptors"] and time.monotonic() < deadline:
            time.sleep(0.1)  # the connection of the request above
        end = at_rest(server, told)
        with log.open(encoding="utf-8") as lines:
            logged = read_log(lines)
    figures, wrong = audit(soak, told, logged, metrics)
    if not arguments.faults and (broken := [status for _, status in logged if status in (500, 503)]):
        wrong.append(f"{len(broken)} requests failed inside the server, and no fault was planned")
    if end["descriptors"] > begin["descriptors"]:
        wrong.append(f"descriptors are left open: {begin['descriptors']} after the warm-up, {end['descriptors']} now")
    seen = [megabytes for _, megabytes in soak.samples]
    return {
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        "clients": arguments.clients,
        "rss_slope_mb_h": round(slope(soak.samples), 2),
        "rss_mb_by_fifths": [round(float(np.median(fifth)), 1) for fifth in np.array_split(seen, 5) if len(fifth)],
        "after_warm_up": begin,
        "end": end,
        **figures,
        "wrong": wrong[:50],
    }, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="of load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other requests (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=24, help="that ask at once (default: %(default)s)")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True, help="fail now and then")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures to this file, too")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server's
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        figures, wrong = run(arguments, log)
        if wrong:
            kept = Path(tempfile.mkstemp(prefix="soak-", suffix=".log")[1])
            kept.write_bytes(log.read_bytes())
            print(f"The server's log is {kept}.", file=sys.stderr)
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
