"""Thousands of bad requests: no answer of 5xx, none late, nothing left, and a good request is answered among them.

`ASYNCLLM_BAD_REQUESTS=100000 ASYNCLLM_BAD_SEED=7 pytest tests/server/test_bad_requests.py` sends more, and others.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.leaks import open_files
from tests.server.bad_requests import Case, bad_requests
from tests.server.raw import Wire, connected, post, until
from tests.server.serving import Served, serving

COUNT = int(os.environ.get("ASYNCLLM_BAD_REQUESTS", "10000"))
SEED = int(os.environ.get("ASYNCLLM_BAD_SEED", "1"))
CONNECTIONS = 12
LATE_S = 5.0
SILENCE_S = 0.01
GOOD = post("/v1/chat/completions", {"messages": "golden", "seed": 5})


@pytest.mark.anyio
@pytest.mark.timeout(60 + COUNT // 50)
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_none_is_a_5xx_or_late_and_nothing_is_left(anyio_backend: Any) -> None:
    print(f"seed {SEED}, {COUNT} requests")
    statuses: collections.Counter[int] = collections.Counter()
    cases = bad_requests(SEED, COUNT)
    async with serving(FakeEngine({"golden": "answer"}), keep_alive_timeout=0.3, body_timeout=0.2) as served:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(send_all(served, cases, statuses))
        await until(lambda: served.service.state.in_work == 0 and served.engine.stats().blocks_held == 0)
        served.engine.check_idle()
        files = len(open_files())
        for _ in range(50):
            async with connected(served) as wire:
                wire.send(next(iter(bad_requests(SEED, 1))).data)
                await read_until_silent(wire)
        await until(lambda: len(open_files()) <= files)
    print(dict(sorted(statuses.items())))
    assert sum(statuses.values()) > COUNT / 2
    assert min(statuses[status] for status in (200, 400, 403, 404, 405)) > COUNT / 1000
    assert [status for status in statuses if status >= 500 and status != 504] == []


async def send_all(served: Served, cases: Iterator[Case], statuses: collections.Counter[int]) -> None:
    """Send cases as they come, on one connection while that is possible; every hundredth is followed by a good one."""
    clock = asyncio.get_running_loop().time
    while True:
        async with connected(served) as wire:
            for case in cases:
                began = clock()
                try:
                    if case.alone:
                        async with connected(served) as other:
                            other.send(case.data)
                            statuses.update(await read_until_silent(other))
                    else:
                        wire.send(case.data)
                        answer = await wire.answer()
                        statuses[answer.status] += 1
                        # A timeout of next to nothing is over at once, as the caller asked.
                        expired = answer.status == 504 and b'"deadline_exceeded"' in answer.body
                        assert answer.status < 500 or expired, (case.kind, case.data[:2000], answer.body)
                except ConnectionError:
                    break
                except TimeoutError:
                    raise AssertionError(f"no answer: {case.kind}, {case.data[:2000]!r}") from None
                assert clock() - began < LATE_S, (case.kind, case.data[:2000])
                if sum(statuses.values()) % 100 == 0:
                    await good(served)
            else:
                await good(served)
                return


async def good(served: Served) -> None:
    """A good request, which is answered as ever."""
    async with connected(served) as wire:
        wire.send(GOOD)
        answer = await wire.answer()
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "answer"


async def read_until_silent(wire: Wire) -> list[int]:
    """The statuses of what comes on a connection whose framing may be broken, until it closes or rests."""
    data = await asyncio.wait_for(wire.reader.read(2**16), LATE_S)
    with contextlib.suppress(TimeoutError):
        while piece := await asyncio.wait_for(wire.reader.read(2**16), SILENCE_S):
            data += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", data)]
