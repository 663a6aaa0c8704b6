"""How many files a reader has to know to follow one request: those that it executes, in the library and over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MOST = {"library": 81, "http": 98}
"""As many as were counted: engine 30, agent 10, text 13, layers and the model 11, kernels 10, config and protocol 5,
event_loop 2, and 17 of the server, six of which the distributor shares. Most of them serve other requests,
models or devices without the rest, so that a file less here would be one with two responsibilities."""


@pytest.fixture(scope="module")
def executed() -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.executed_files"], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("way", ["library", "http"])
def test_a_request_executes_few_files(executed: dict[str, list[str]], way: str) -> None:
    assert len(executed[way]) <= MOST[way], executed[way]


def test_the_recorder_sees_all_threads(executed: dict[str, list[str]]) -> None:
    """The model runs in the executor's thread, and HTTP adds the server to what the library does."""
    for file in ("engine/loop/engine_loop.py", "agent/model_agent.py", "models/decoder.py", "kernels/attention.py"):
        assert file in executed["library"]
    assert set(executed["library"]) <= set(executed["http"])
    assert "server/sse.py" in executed["http"]
    assert not any(file.startswith("server/") for file in executed["library"])
