"""The load on a server: what is asked, and that every answer is whole."""

from __future__ import annotations

import pytest
import serve
from workloads import LONGEST

from asyncllm.testing import FakeEngine
from tests.server.serving import serving


def test_the_same_requests_every_time_within_the_bounds() -> None:
    work = serve.jobs(200, seed=1)
    assert work == serve.jobs(200, seed=1) != serve.jobs(200, seed=2)
    assert all(4 <= len(prompt) <= LONGEST and 4 <= tokens <= LONGEST for prompt, tokens in work)


@pytest.mark.anyio
async def test_streams_are_read_to_their_ends() -> None:
    async with serving(FakeEngine("x" * 4000)) as served:
        answered = await serve.read_streams(served.url, "fake", 3, [("abc", 5), ("d", 9), ("ef", 4), ("g", 6)])
    assert sorted(each.tokens for each in answered) == [4, 5, 6, 9]
    assert all(each.events == each.tokens for each in answered)
    assert all(0 < each.first <= each.last for each in answered)


@pytest.mark.anyio
async def test_an_answer_that_breaks_off_is_an_error() -> None:
    async with serving(FakeEngine("x" * 4000, fail_at=3)) as served:
        with pytest.raises(RuntimeError, match="engine_unavailable"):
            await serve.read_streams(served.url, "fake", 1, [("abc", 9)])
