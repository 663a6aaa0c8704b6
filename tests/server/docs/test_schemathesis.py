"""Schemathesis against /openapi.json: what it forbids is refused, and all answers are as it says.

It brings a dozen packages, so it is no part of the `test` extra:

    pip install schemathesis
    ASYNCLLM_SCHEMATHESIS=100 pytest -s tests/server/docs/test_schemathesis.py

runs that many examples for each operation, valid and invalid ones.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from asyncllm.testing import FakeEngine
from tests.server.raw import until
from tests.server.serving import serving

ROOT = Path(__file__).parents[3]
EXAMPLES = os.environ.get("ASYNCLLM_SCHEMATHESIS", "")


@pytest.mark.anyio
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not EXAMPLES, reason="ASYNCLLM_SCHEMATHESIS names no number of examples")
async def test_the_server_does_what_its_document_says(tmp_path: Path) -> None:
    engine = FakeEngine("pong", max_position=64)  # so that an answer of the most tokens is short
    async with serving(engine) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"),
            *("--max-examples", EXAMPLES, "--mode", "all", "--seed", "1", "--workers", "1"),
            *("--phases", "examples,coverage,fuzzing", "--request-timeout", "15", "--continue-on-failure"),
            # A schema cannot say that min_tokens is at most max_tokens, or that stream_options needs stream.
            *("--exclude-checks", "positive_data_acceptance"),
            cwd=tmp_path,  # it keeps a cache of what failed
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "tests.server.schemathesis_hooks",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
        )
        assert await process.wait() == 0
        await until(lambda: served.service.state.in_work == 0 and engine.stats().blocks_held == 0)
        engine.check_idle()
