"""The soak: its requests, its books, which must be able to tell what is missing, and a short one of a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import soak
from soak_books import Books, Record, outcome_of, read_log, read_metrics
from soak_client import Asking
from soak_requests import _BAD, Asked, draw_requests

from asyncllm.testing import FakeEngine
from tests.bench.conftest import FOLDER
from tests.server.serving import serving

ASKED = Asked(7, "chat", "POST", "/v1/chat/completions", b'{"messages": "ping", "stream": true, "max_tokens": 40}')


def record(number: int, outcome: Any = "finished", **fields: Any) -> Record:
    return Record(replace(ASKED, number=number), outcome, **{"status": 200, "heard": True, **fields})


def books(records: list[Record], log: dict[int, int], metrics: dict[Any, int] | None = None) -> Books:
    logged = [(f"soak-{number}", status) for number, status in log.items()]
    counted = Counter(outcome_of(status) for status in log.values()) if metrics is None else Counter(metrics)
    return Books.of({each.asked.id: each for each in records}, logged, counted)


class TestRequests:
    def test_the_same_for_the_same_seed_and_no_number_twice(self) -> None:
        first, second = (list(islice(draw_requests(1, client, 2), 300)) for client in (0, 1))
        assert first == list(islice(draw_requests(1, 0, 2), 300)) != list(islice(draw_requests(2, 0, 2), 300))
        assert len({each.id for each in first + second}) == 600

    def test_a_tenth_is_left_a_twentieth_is_bad_and_all_kinds_come(self) -> None:
        drawn = list(islice(draw_requests(3, 0, 1), 4000))
        assert sum(each.leaves is not None for each in drawn) / 4000 == pytest.approx(0.10, abs=0.02)
        assert sum(each.bad for each in drawn) / 4000 == pytest.approx(0.05, abs=0.015)
        assert {each.leaves for each in drawn} >= {"in the head", "in the body", "at once", "waiting", "in the answer"}
        assert len({each.kind for each in drawn if each.bad}) == len(_BAD)
        assert len({each.kind for each in drawn if not each.bad}) >= 10


class TestBooks:
    def test_what_agrees(self) -> None:
        found = books(
            [record(1), record(2, "cancelled", left_at=5.0), record(3, "rejected"), record(4, "failed")],
            {1: 200, 2: 499, 3: 429, 4: 504},
        )
        assert found.imbalances == []
        assert found.client == {"started": 4, "finished": 1, "failed": 1, "cancelled": 1, "rejected": 1}
        assert found.client == found.log == found.metrics

    def test_a_client_that_left_is_counted_as_by_the_server(self) -> None:
        found = books(
            [record(1, "cancelled", left_at=5.0), record(2, "cancelled", left_at=5.0, heard=False)],
            {1: 200},
        )
        assert found.imbalances == []
        assert (found.unread, found.crossed) == (1, {"finished": 1})
        assert found.client == {"started": 1, "finished": 1, "failed": 0, "cancelled": 0, "rejected": 0}

    @pytest.mark.parametrize(
        ("records", "log", "metrics"),
        [
            pytest.param([record(1)], {}, None, id="not logged"),
            pytest.param([record(1, "cancelled", left_at=5.0)], {}, None, id="not logged, and it had begun"),
            pytest.param([record(1)], {1: 499}, None, id="logged as left"),
            pytest.param([record(1)], {1: 200, 2: 200}, None, id="logged, and nobody sent it"),
            pytest.param([record(1)], {1: 200}, {"failed": 1}, id="counted otherwise"),
            pytest.param([record(1)], {1: 200}, {"finished": 2}, id="counted twice"),
        ],
    )
    def test_what_does_not(self, records: list[Record], log: dict[int, int], metrics: Any) -> None:
        assert books(records, log, metrics).imbalances

    def test_a_line_that_comes_twice(self) -> None:
        found = Books.of({"soak-1": record(1)}, [("soak-1", 200)] * 2, Counter({"finished": 2}))
        assert any("2 times" in each for each in found.imbalances)

    def test_the_log_is_read_as_the_server_writes_it(self) -> None:
        line = "2026-11-21 23:08:52,999 INFO asyncllm.server: {} 200 3.1 ms id={} key=-\n"
        lines = [line.format("POST /generate", "a"), line.format("GET /metrics", "b"), "a traceback\n"]
        assert read_log(lines) == [("a", 200)]

    @pytest.mark.anyio
    async def test_metrics_are_read_as_the_server_gives_them(self) -> None:
        async with serving(FakeEngine()) as served:
            await served.post("/generate", {"prompt": "ping"})
            await served.post("/generate", {})
            for _ in range(2):
                async with served.http.get(f"{served.url}/metrics") as response:
                    text = await response.text()
        assert read_metrics(text) == {"finished": 1, "rejected": 1}


@pytest.mark.anyio
class TestClient:
    async def ask(self, **changes: Any) -> Record | None:
        async with serving(FakeEngine("x" * 100, delay_per_token=0.002)) as served:
            client = Asking(served.url)
            try:
                return await client.ask(replace(ASKED, **changes))
            finally:
                client.leave()
                await served.service.state.idle.wait()

    async def test_it_reads_to_the_end(self) -> None:
        found = await self.ask()
        assert found is not None
        assert (found.outcome, found.status, found.left_at, found.complaint) == ("finished", 200, 0.0, "")

    async def test_it_complains_when_a_bad_request_is_served(self) -> None:
        found = await self.ask(bad=True)
        assert found is not None
        assert "a bad request got 200" in found.complaint

    @pytest.mark.parametrize("leaves", ["in the body", "at once", "waiting", "in the answer"])
    async def test_it_leaves(self, leaves: Any) -> None:
        found = await self.ask(leaves=leaves, delay=0.0, pieces=2)
        assert found is not None
        assert (found.outcome, found.heard) == ("cancelled", leaves == "in the answer")
        assert found.left_at > 0

    async def test_what_was_left_in_its_head_is_no_request(self) -> None:
        assert await self.ask(leaves="in the head") is None


def test_a_slope_is_per_hour() -> None:
    assert soak.slope([(0.0, 10.0), (1800.0, 11.0), (3600.0, 12.0)]) == pytest.approx(2.0)
    assert soak.slope([(0.0, 10.0)]) == 0.0


@pytest.mark.timeout(300)
def test_a_short_one_balances(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, f"{FOLDER}/soak.py", "--minutes", "0.05", "--clients", "6", "--output", str(output)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(Path(FOLDER).parent)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    assert figures["wrong"] == []
    assert figures["books"]["client"]["started"] > 0
    assert figures["blocks_at_the_end"]["device"]["held"] == 0
