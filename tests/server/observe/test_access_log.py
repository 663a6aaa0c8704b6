"""The access log: one line for each request, written by the server alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.config import ServerConfig
from asyncllm.server.observe.access_log import log_request, logging_to_stderr
from asyncllm.server.run import run
from asyncllm.testing import FakeEngine
from tests.engine.waits import until
from tests.server.serving import serving

PING: list[Any] = [{"role": "user", "content": "a secret prompt"}]


@pytest.mark.anyio
async def test_a_request_is_one_line_without_its_prompt_or_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncllm.server")
    async with serving(FakeEngine(), api_keys=["first", "second"]) as served:
        headers = {"Authorization": "Bearer second", "X-Request-Id": "my-request"}
        for stream in (False, True):
            async with served.http.post(
                f"{served.url}/v1/chat/completions?why=secret",
                json={"messages": PING, "stream": stream},
                headers=headers,
            ) as response:
                await response.read()
        await served.get("/v1/models/some%2Fmodel", headers={"Authorization": "Bearer third"})
        await served.get("/health")
    first, second, third, fourth = (message.split() for message in caplog.messages)
    for words in (first, second):
        assert words[:3] == ["POST", "/v1/chat/completions", "200"]
        assert 0 < float(words[3]) < 60_000
        assert words[4:] == ["ms", "id=my-request", "key=1"]
    assert third[:3] == ["GET", "/v1/models/{id:.+}", "401"]
    assert third[-1] == "key=-"
    assert fourth[:3] == ["GET", "/health", "200"]
    assert "secret" not in caplog.text


@pytest.mark.anyio
async def test_lines_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncllm.server")
    async with serving(FakeEngine()) as served:
        path = "/x%0A%0DPOST%20/v1/chat/completions%20200%1B[2J%C2%85%E2%80%A8%E2%80%AE%E2%81%A6" + "y" * 500
        await served.get(path, headers={"X-Request-Id": "no such id"})
    [line] = caplog.messages
    assert line.isprintable()
    assert line.startswith(r"GET /x\n\rPOST /v1/chat/completions 200\x1b[2J\x85\u2028\u202e\u2066yyy")
    assert len(line) < 250
    assert "no such id" not in line


@pytest.mark.anyio
async def test_a_client_that_left_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncllm.server")
    engine = FakeEngine()
    async with serving(engine) as served:
        engine.executor.pause()
        asking = asyncio.create_task(served.post("/v1/chat/completions", {"messages": PING}))
        await until(lambda: engine.stats().running)
        asking.cancel()
        await asyncio.wait([asking])
        await served.service.state.idle.wait()
        engine.executor.resume()
    assert [message.split()[2] for message in caplog.messages] == ["499"]


def test_nothing_is_formatted_below_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncllm.server")
    log_request("GET", "/", 200, 0.0, "id", -1)
    assert not caplog.records


class TestLoggingToStderr:
    @pytest.fixture
    def unconfigure(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        """To be called in the test: hides the handlers that pytest adds for it, as if logging were not set up."""

        def unconfigure() -> None:
            monkeypatch.setattr(logging.getLogger("asyncllm"), "propagate", False)
            monkeypatch.setattr(logging.getLogger("asyncllm"), "handlers", [])

        return unconfigure

    def test_the_level_and_one_line_per_message(
        self, capsys: pytest.CaptureFixture[str], unconfigure: Callable[[], None]
    ) -> None:
        unconfigure()
        logger, before = logging.getLogger("asyncllm.server"), logging.getLogger("asyncllm").level
        with logging_to_stderr("INFO"):
            logger.debug("too much detail")
            logger.info("a\nb")
        err = capsys.readouterr().err
        assert err.endswith("INFO asyncllm.server: a\\nb\n")
        assert "too much detail" not in err
        assert logging.getLogger("asyncllm").handlers == []
        assert logging.getLogger("asyncllm").level == before

    def test_a_traceback_writes_no_lines_of_the_log(
        self, capsys: pytest.CaptureFixture[str], unconfigure: Callable[[], None]
    ) -> None:
        unconfigure()
        with logging_to_stderr("INFO"):
            try:
                raise ValueError("a\n2030-01-01 INFO asyncllm.server: forged\x1b[2J")
            except ValueError:
                logging.getLogger("asyncllm.server").exception("it failed")
        first, *rest = capsys.readouterr().err.splitlines()
        assert first.endswith("it failed")
        assert all(line.startswith("  ") for line in rest)
        assert rest[-1].endswith(r"forged\x1b[2J")

    def test_a_program_keeps_its_own_handlers(self, capsys: pytest.CaptureFixture[str]) -> None:
        package, records = logging.getLogger("asyncllm"), []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        package.addHandler(handler)
        try:
            with logging_to_stderr("INFO"):
                package.info("once")
        finally:
            package.removeHandler(handler)
        assert len(records) == 1
        assert capsys.readouterr().err == ""

    @pytest.mark.anyio
    @pytest.mark.parametrize("level", ["INFO", "WARNING"])
    async def test_a_server_that_runs_logs_from_its_level_up(
        self, level: Any, capsys: pytest.CaptureFixture[str], unconfigure: Callable[[], None]
    ) -> None:
        unconfigure()
        import aiohttp

        told: asyncio.Queue[str] = asyncio.Queue()
        task = asyncio.create_task(
            run(
                FakeEngine,
                ServerConfig(server_port=0, log_level=level, generation_config="none"),
                announce=told.put_nowait,
            )
        )
        async with asyncio.timeout(10):
            url = await told.get()
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
            assert response.status == 200
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ("GET /health 200" in capsys.readouterr().err) == (level == "INFO")
