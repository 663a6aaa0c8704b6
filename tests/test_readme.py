"""What README.md tells to type about serving works as it stands there. Its other commands are those of `.ci/run`."""

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

from tests.serve.processes import ServerProcess

SECTION = re.search(r"\n## Serve\n(.*?)\n## ", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)
assert SECTION is not None
SERVE, ASK, PROGRAM = re.findall(r"```\w+\n(.*?)```", SECTION[1], re.DOTALL)


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
