"""Importing the package and asking for help are quick, and load no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import children_seconds

ROOT = Path(__file__).parent.parent
LIMIT_S = 0.3
DISTRIBUTOR_LIMIT_S = 0.7
"""With an HTTP server and its client, and metrics."""
TRIES = 3

NO_TORCH = "assert not {'torch', 'transformers', 'aiohttp', 'jinja2'} & set(sys.modules), 'heavy import'"
NO_MODEL = "assert not {'torch', 'transformers', 'numpy', 'asyncllm.engine'} & set(sys.modules), 'heavy import'"
PROGRAMS = {
    "import asyncllm": f"import sys, asyncllm; {NO_TORCH}",
    **{
        " ".join(["asyncllm", *command]): (
            "import sys, asyncllm.cli\n"
            f"try:\n    asyncllm.cli.main({command})\n"
            f"except SystemExit as end:\n    assert end.code == 0\n{NO_TORCH}"
        )
        for command in (["--help"], ["serve", "api_server", "--help"], ["serve", "proxy", "--help"])
    },
}


PROGRAMS["asyncllm serve proxy"] = f"import sys, asyncllm.cli, asyncllm.server.distributor.run; {NO_MODEL}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_start_is_quick(name: str) -> None:
    limit = DISTRIBUTOR_LIMIT_S if name == "asyncllm serve proxy" else LIMIT_S
    times = []
    for _ in range(TRIES):
        with children_seconds() as taken:
            subprocess.run([sys.executable, "-c", PROGRAMS[name]], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        times.extend(taken)
        if times[-1] < limit:
            return
    pytest.fail(f"{name} takes {min(times):.3f} s of a processor, the limit is {limit} s")
