"""Importing the package and asking for help are quick, and load no torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 0.3
TRIES = 3

NO_TORCH = "assert not {'torch', 'transformers', 'aiohttp', 'jinja2'} & set(sys.modules), 'heavy import'"
PROGRAMS = {
    "import asyncllm": f"import sys, asyncllm; {NO_TORCH}",
    **{
        " ".join(["asyncllm", *command]): (
            "import sys, asyncllm.cli\n"
            f"try:\n    asyncllm.cli.main({command})\n"
            f"except SystemExit as end:\n    assert end.code == 0\n{NO_TORCH}"
        )
        for command in (["--help"], ["serve", "api_server", "--help"])
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_start_is_quick(name: str) -> None:
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", PROGRAMS[name]], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
        if times[-1] < LIMIT_S:
            return
    pytest.fail(f"{name} takes {min(times):.3f} s, the limit is {LIMIT_S} s")
