"""Programs and commands written for LMDeploy's server run after changing the package's name and the model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm import cli
from tests.processes import ServerProcess
from tests.seed_samples import TEMPLATE_JSON
from tests.seed_server_samples import API_CLIENT, COMMANDS, CURL, OPENAI, SERVE

SMALL = ["--server-port", "0", "--num-gpu-blocks", "200", "--device-type", "cpu"]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    command = COMMANDS[2].replace("$repo_id", str(tiny_checkpoint)).replace("$model_name", "internlm-chat-7b")
    with ServerProcess(*command.split()[2:], *SMALL) as server:
        yield server.ready()


def at(server: ServerProcess, sample: str) -> str:
    """The sample with the address of a running server."""
    address = server.url.removeprefix("http://")
    sample, count = re.subn(r"\{server_ip\}:\{server_port\}", address, sample)
    sample, more = re.subn(r"0\.0\.0\.0:23333", f"0.0.0.0:{address.rpartition(':')[2]}", sample)
    assert count + more == 1
    return sample


def renamed(sample: str) -> str:
    assert "lmdeploy" in sample
    return sample.replace("lmdeploy", "asyncllm")


@pytest.mark.parametrize("name", OPENAI)
def test_openai_sample(name: str, server: ServerProcess) -> None:
    program = [sys.executable, "-c", at(server, OPENAI[name])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.startswith("ChatCompletion(id='chatcmpl-")


@pytest.mark.parametrize("name", API_CLIENT)
def test_api_client_sample(name: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(renamed(at(server, API_CLIENT[name])), "sample", "exec"), {})
    items = [eval(line) for line in capsys.readouterr().out.splitlines()]
    if name == "interactive":
        assert [item["history_tokens"] > 0 for item in items] == [False, True, True, True]
    else:
        [item] = items
        assert item["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("name", CURL)
def test_curl_sample(name: str, server: ServerProcess) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    sample = at(server, CURL[name]).replace('"llama"', '"internlm-chat-7b"').replace("curl ", "curl -sS --fail ", 1)
    done = subprocess.run(["sh", "-c", sample], capture_output=True, text=True, timeout=50, check=True)
    answer = json.loads(done.stdout)
    expected = {"models": "data", "interactive": "finish_reason"}.get(name, "choices")
    assert answer[expected]


@pytest.mark.parametrize("name", SERVE)
def test_serve_sample(name: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "template.json").write_text(TEMPLATE_JSON)
    sample, count = re.subn(r"'internlm/[^']*'", f"{str(tiny_checkpoint)!r}", renamed(SERVE[name]))
    assert count == 1
    sample = sample.replace("${JSON_FILE}", str(tmp_path / "template.json"))
    # The default port may be taken on this machine.
    sample = re.sub(r"\)\n(for|$)", r", server_port=0)\n\1", sample, count=1)
    names: dict[str, object] = {}
    exec(compile(sample, "sample", "exec"), names)
    client = names["client"]
    with client:  # type: ignore[attr-defined]
        assert len(client.available_models) == 1  # type: ignore[attr-defined]
    if name == "client":
        text, tokens, finish_reason = eval(capsys.readouterr().out)
        assert isinstance(text, str)
        assert tokens > 0
        assert finish_reason in ("stop", "length")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.server import run

    served = []

    async def serve(engine: object, config: object) -> None:
        served.append((engine, config))

    monkeypatch.setattr(run, "run", serve)
    (tmp_path / "template.json").write_text(TEMPLATE_JSON)
    values = {
        "$repo_id": "internlm/internlm2-chat-7b",
        "$model_name": "internlm",
        "${JSON_FILE}": str(tmp_path / "template.json"),
        "${server_ip}": "127.0.0.1",
        "${server_port}": "23333",
    }
    for name, value in values.items():
        command = command.replace(name, value)
    assert cli.main(shlex.split(command)[1:]) == 0
    assert len(served) == 1
