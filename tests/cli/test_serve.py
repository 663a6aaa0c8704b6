"""`asyncllm serve` as a real process: it serves, drains, and ends."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from asyncllm import cli, serve
from asyncllm.cli import flags
from asyncllm.config import EngineConfig, ServerConfig
from asyncllm.http_client import child
from asyncllm.server.http.listening import fastest_loop
from asyncllm.server.run import run
from asyncllm.testing import FakeEngine
from tests.processes import ROOT, ServerProcess, free_port

SMALL = ["--num-gpu-blocks", "200", "--device-type", "cpu"]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
LONG = 600
"""Tokens of an answer that still runs when a signal comes."""


@pytest.fixture
def options(tiny_checkpoint: Path) -> list[str]:
    return [str(tiny_checkpoint), "--server-port", "0", *SMALL]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="k2", max_retries=0)


def stream(client: openai.OpenAI, tokens: int) -> openai.Stream[Any]:
    answer: openai.Stream[Any] = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_tokens=tokens, extra_body={"ignore_eos": True}
    )
    return answer


def listens(server: ServerProcess) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) == 0


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM, signal.SIGHUP], [signal.SIGHUP, signal.SIGHUP]], ids=["SIGTERM", "SIGHUP"]
)
def test_it_serves_and_a_signal_lets_a_running_stream_finish(options: list[str], numbers: list[signal.Signals]) -> None:
    with ServerProcess("api_server", *options, "--api-keys", "k1", "k2", "--log-level", "ERROR") as server:
        with client_of(server.ready()) as client:
            assert client.chat.completions.create(model="tiny", messages=HELLO).usage is not None
            running = stream(client, LONG)
            next(running)
            for number in numbers:
                server.process.send_signal(number)
                while listens(server):
                    time.sleep(0.01)
            *_, last = running
            assert last.choices[0].finish_reason == "length"
        status, written = server.end()
        assert status == 0
        assert "Traceback" not in written
        assert not server.left_over()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_ends_at_once(number: signal.Signals, options: list[str]) -> None:
    with ServerProcess(*options) as server, client_of(server.ready()) as client:
        running = stream(client, 7000)
        next(running)
        server.process.send_signal(number)
        while listens(server):
            time.sleep(0.01)
        began = time.monotonic()
        server.process.send_signal(number)
        with pytest.raises(openai.APIError):
            list(running)
        assert server.end()[0] == 0
        assert time.monotonic() - began < 5


def test_a_full_disk_behind_standard_error_ends_no_server() -> None:
    port = free_port()
    with open("/dev/full", "wb", buffering=0) as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.dying_server", "--server-port", str(port), "--log-level", "INFO"],
            cwd=ROOT,
            stderr=full,
        )
    try:
        deadline = time.monotonic() + 20
        status = 0
        while status != 200 and process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as asking:
                asking.request("GET", "/health")
                status = asking.getresponse().status
            time.sleep(0.02)
        assert status == 200
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.anyio
async def test_nohup_is_respected(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    told: asyncio.Queue[str] = asyncio.Queue()
    settings = ServerConfig(server_port=0, generation_config="none", log_level="CRITICAL")
    task = asyncio.create_task(run(FakeEngine, settings, announce=told.put_nowait))
    try:
        await told.get()
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
        if not ignored:
            signal.raise_signal(signal.SIGHUP)
            async with asyncio.timeout(5):
                await task
    finally:
        task.cancel()
        await asyncio.wait([task])
        signal.signal(signal.SIGHUP, before)


def test_an_idle_server_ends_by_ctrl_c(options: list[str]) -> None:
    with ServerProcess(*options) as server:
        server.ready()
        status, written = server.end(signal.SIGINT)
    assert status == 0
    assert "Traceback" not in written


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_ending_it_while_the_model_loads_leaves_nothing(number: signal.Signals, options: list[str]) -> None:
    port = free_port()
    with ServerProcess(*options, "--server-port", str(port)) as server:
        server.wait_for_socket(port)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as early:
            early.request("GET", "/health")
            answer = early.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert b"starting" in answer.read()
        status, written = server.end(number)
        assert status == (-number if number == signal.SIGKILL else 0)
        assert "Traceback" not in written
        assert not server.left_over()
        server.url = f"http://127.0.0.1:{port}"
        assert not listens(server)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with ServerProcess("--server-port", str(taken.getsockname()[1])) as server:
            status, written = server.end()
    assert status == 2
    assert "error: --server-port: Cannot listen on 127.0.0.1:" in written
    assert "Traceback" not in written


def test_too_many_deaths_of_the_engine_end_the_process() -> None:
    with ServerProcess("--server-port", "0", "--max-restarts", "1", program=("tests.cli.dying_server",)) as server:
        with client_of(server.ready()) as client:

            def ask(text: str) -> Any:
                return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}])

            with pytest.raises(openai.InternalServerError) as died:
                ask("death")
            assert died.value.response.headers["retry-after"]
            # The new engine has taken over on the same port; a client that tries again gets there by itself.
            answer = client.with_options(max_retries=5).chat.completions.create(model="fake", messages=HELLO)
            assert answer.choices[0].message.content == "pong"
            with pytest.raises(openai.InternalServerError):
                ask("death")
        status, written = server.end()
        assert status == 1
        assert "it is restarted (1 of 1" in written
        assert "max_restarts is 1" in written
        assert not server.left_over()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["./nowhere", "--server-port", "0"], 1, "./nowhere"),
        (["api_server", "--server-name", "0.0.0.0"], 2, "error: --server-name: "),
        (["--ssl"], 2, "error: --ssl: ssl needs a key and a certificate"),
        (["--ssl", "--ssl-keyfile", "./no.key", "--ssl-certfile", "./no.pem"], 2, "FileNotFoundError"),
        (["--ssl-keyfile", "./no.key"], 2, "error: --ssl-keyfile: "),
        (["--api-key-file", "./no.keys"], 2, "error: --api-key-file: "),
        (["--adapters-folder", "./nowhere", "--admin-key-file", __file__], 2, "error: --adapters-folder: "),
        (["--allow-origins", "*"], 2, "error: --allow-origins: "),
        (["--api-keys", "k1", "k2", "tiny-chat"], 2, "--api-keys takes all words that follow"),
        (["--server-prt", "1"], 2, "did you mean --server-port?"),
        (["--serve-port", "1"], 2, "did you mean --server-port?"),
        (["--hosts", "x"], 2, "did you mean --host?"),
        (["--backend", "cuda"], 2, "invalid choice: 'cuda'"),
        (["tiny-chat", "other"], 2, "other"),
    ],
    ids=str,
)
def test_mistakes(
    arguments: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SSL_KEYFILE", raising=False)
    try:
        found = cli.main(["serve", *arguments])
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def parsed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options with which `asyncllm serve` would run."""
    from asyncllm.cli import serve as command

    found: dict[str, Any] = {}

    def serve(options: Any) -> int:
        found.update(vars(options))
        return 0

    monkeypatch.setattr(command, "_serve", serve)
    assert cli.main(arguments) == 0
    return found


def test_how_a_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(["serve"], monkeypatch)["model"] is None
    assert parsed(["serve", "folder"], monkeypatch)["model"] == "folder"
    assert parsed(["serve", "--server-port", "1", "folder"], monkeypatch)["model"] == "folder"
    assert parsed(["serve", "api_server"], monkeypatch)["model"] is None
    assert parsed(["serve", "api_server", "folder"], monkeypatch)["model"] == "folder"
    assert parsed(["serve", "./api_server"], monkeypatch)["model"] == "./api_server"


def test_options_as_vllm_and_sglang_spell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(["serve", "m", "--host", "127.0.0.1", "--port", "8000"], monkeypatch)
    assert (options["server_name"], options["server_port"]) == ("127.0.0.1", 8000)


def test_options_as_lmdeploy_spells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--server_port 8000 --api-keys a b --backend turbomind --disable-fastapi-docs --session-len 9"
    options = parsed(["serve", "api_server", "m", *given.split()], monkeypatch)
    wanted = {"server_port": 8000, "api_keys": ["a", "b"], "disable_docs": True, "session_len": 9}
    assert {name: options[name] for name in wanted} == wanted


def test_the_queue_of_a_server_has_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The library's has none: a program's own prompts may wait as long as it likes."""
    assert (EngineConfig().max_queued_requests, EngineConfig().max_queued_tokens) == (0, 0)
    for given, wanted in (
        ([], (2048, 2**22)),
        (["--max-queued-requests", "0", "--max-queued-tokens", "7"], (0, 7)),
    ):
        options = parsed(["serve", "m", *given], monkeypatch)
        config = flags.load(Namespace(**options), EngineConfig)
        assert (config.max_queued_requests, config.max_queued_tokens) == wanted
    with pytest.raises(SystemExit):
        cli.main(["serve", "api_server", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Default: 2048." in told
    assert "Default: 4194304." in told
    started: list[Any] = []
    monkeypatch.setattr(child, "start", started.append)
    serve("m")
    serve("m", backend_config=EngineConfig(max_batch_size=3))
    assert [each.engine.max_queued_requests for each in started] == [2048, 0]


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(make: Callable[[], Any]) -> str:
        loop = make()
        loop.close()
        return type(loop).__module__

    assert kind(fastest_loop()) == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert kind(fastest_loop()).startswith("asyncio")
