"""The programs of README.md and its commands for serving work as written. `.ci/run` runs its other commands."""

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

from tests.processes import ServerProcess

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SECTION = re.search(r"\n## Serve\n(.*?)\n## ", README, re.DOTALL)
assert SECTION is not None
SERVE, ASK, PROGRAM = re.findall(r"```\w+\n(.*?)```", SECTION[1], re.DOTALL)

PROGRAMS = [program for program in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if program != PROGRAM]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    asyncllm, serve, *arguments = shlex.split(SERVE)
    assert (asyncllm, serve) == ("asyncllm", "serve")
    # The port of the README may be taken on this machine.
    with ServerProcess(*arguments, "--server-port", "0", "--device-type", "cpu") as server:
        yield server.ready()


def at(server: ServerProcess, text: str) -> str:
    assert "http://127.0.0.1:23333" in text
    return text.replace("http://127.0.0.1:23333", server.url)


def test_curl(server: ServerProcess) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command, _, client = ASK.strip().rpartition("\n")
    assert client == "asyncllm serve api_client"
    done = subprocess.run(["sh", "-c", at(server, command)], capture_output=True, text=True, timeout=50, check=True)
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "stop"


def test_openai_client(server: ServerProcess) -> None:
    program = [sys.executable, "-c", at(server, PROGRAM)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout
