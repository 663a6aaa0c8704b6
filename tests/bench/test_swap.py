"""bench/swap.py on the bundled model, and where copying begins to be worth it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import swap
from swap import crossover
from table import read_records

ROOT = Path(__file__).parent.parent.parent
CONFIG = '{"device_type": "cpu", "block_size": 16, "dtype": "bfloat16"}'


@pytest.mark.parametrize(
    ("copying", "computing", "expected"),
    [
        ([1, 1, 1], [2, 3, 4], 10),
        ([3, 3, 3], [1, 3, 5], 20),
        ([3, 3, 3], [1, 2, 4], 30),
        ([1, 9, 3], [2, 2, 9], 20 + 20 * 7 / 13),
        ([1, 2, 9], [2, 3, 5], None),
    ],
)
def test_the_crossover_lies_behind_the_last_length_that_is_faster_computed(
    copying: list[float], computing: list[float], expected: float | None
) -> None:
    assert crossover([10, 20, 40], copying, computing) == (None if expected is None else pytest.approx(expected))


def test_figures_of_the_bundled_model(tmp_path: Path) -> None:
    out, picture = tmp_path / "swap.json", tmp_path / "swap.png"
    command = [sys.executable, "bench/swap.py", "--tokens", "40,7", "--config", CONFIG, "--json", str(out)]
    if find_spec("matplotlib") is not None:
        command += ["--plot", str(picture)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    short, long, summary = read_records(out)
    assert [(each["tokens"], each["blocks"]) for each in (short, long)] == [(7, 1), (40, 3)]
    assert long["MB"] == pytest.approx(3 * short["MB"], abs=0.002)
    for record in (short, long):
        assert record["out_GBs"] == pytest.approx(record["MB"] / record["out_ms"], rel=0.1, abs=0.02)
        assert min(record["in_GBs"], record["copy_ms"], record["compute_ms"]) > 0
    assert (summary["device"], summary["dtype"], summary["block_size"]) == ("cpu", "bfloat16", 16)
    assert picture.exists() == ("--plot" in command)


def test_more_tokens_than_the_model_has_are_refused() -> None:
    with pytest.raises(SystemExit, match="positions"):
        swap.measure("tiny-chat", [10**6], json.loads(CONFIG))
