"""bench/adapters.py on the bundled model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from table import read_records

ROOT = Path(__file__).parent.parent.parent
CONFIG = '{"device_type": "cpu", "num_gpu_blocks": 32}'


@pytest.mark.timeout(180)
def test_figures_of_the_bundled_model(tmp_path: Path) -> None:
    out = tmp_path / "adapters.json"
    command = [sys.executable, "bench/adapters.py", "--batches", "1,2", "--counts", "0,1,2", "--json", str(out)]
    command += [
        "--prompt-len",
        "8",
        "--new-tokens",
        "6",
        "--rank",
        "4",
        "--config",
        CONFIG,
        "--while-loading",
        "--mix",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment)
    records = read_records(out)
    (loading,) = [each for each in records if each["work"] == "while loading"]
    assert loading["load_ms"] > 0
    records = [each for each in records if "step_ms" in each]
    assert [(each["engine"], each["work"], each["adapters"]) for each in records] == [
        ("base", "b1", 0),
        ("base", "b2", 0),
        *(("with adapters", "b1", count) for count in (0, 1)),
        *(("with adapters", "b2", count) for count in (0, 1, 2)),
    ]
    steps = {each["work"]: each["step_ms"] for each in records[:2]}
    assert all(each["ratio"] == pytest.approx(each["step_ms"] / steps[each["work"]], abs=2e-3) for each in records)
