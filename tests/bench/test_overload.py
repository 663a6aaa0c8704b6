"""The overload: what is counted as answered in time, refused and expired, of a server in this process."""

from __future__ import annotations

import pytest
from overload import Asked, Load, figures, goodput, quality_of_service

from asyncllm import EngineConfig
from asyncllm.engine.schedule.quality_of_service import QualityOfService
from asyncllm.testing import FakeEngine
from tests.engine.test_quality_of_service import write
from tests.server.serving import serving


def asked(status: int, tokens: int = 10, began: float = 1.0, last: float = 2.0) -> Asked:
    return Asked(None, tokens, began, status, 0.5, last)


def test_goodput_is_of_whole_answers() -> None:
    assert goodput([asked(200), asked(200, tokens=30), asked(429), asked(504)], seconds=4.0) == 10.0


def test_figures_are_of_what_ended_in_time() -> None:
    load = Load("http://nowhere", 1.0, 10)
    load.asked = [asked(200), asked(429), asked(504), asked(200, began=9.0), asked(200, began=0.0, last=0.5)]
    found = figures(load, 1.0, 10.0, capacity=10.0)
    assert (found["answered"], found["refused"], found["expired"]) == (1, 1, 1)
    assert found["ratio"] == pytest.approx(10 / 9 / 10, abs=0.001)


def test_the_policy_holds(tmp_path) -> None:  # type: ignore[no-untyped-def]
    users = QualityOfService.open(write(tmp_path, quality_of_service())).users
    assert (users["boss"].group, users["ann"].group, users["ann"].quota) == (0, 1, 60)


@pytest.mark.anyio
async def test_an_open_loop_against_a_full_server() -> None:
    config = EngineConfig(max_batch_size=1, max_queued_requests=1)
    async with serving(FakeEngine("x" * 100, config, delay_per_token=0.005)) as served:
        load = Load(served.url, 0.2, 16)
        await load.open({None: 60.0}, 0.5)
    statuses = {each.status for each in load.asked}
    assert statuses >= {200, 429}
    assert statuses <= {200, 429, 504}
    assert len(load.asked) == pytest.approx(30, abs=20)


@pytest.mark.anyio
async def test_a_closed_loop_is_answered() -> None:
    async with serving(FakeEngine("x" * 100)) as served:
        load = Load(served.url, 60.0, 4)
        await load.closed(3, 0.2)
    assert len(load.asked) >= 3
    assert {each.status for each in load.asked} == {200}
