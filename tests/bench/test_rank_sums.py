"""bench/rank_sums.py with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from table import read_records

ROOT = Path(__file__).parent.parent.parent


def test_figures_of_two_ranks_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "sums.json"
    command = [sys.executable, "bench/rank_sums.py", "--size", "64", "--rows", "1,5", "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    records = read_records(out)
    assert [(each["ranks"], each["rows"], each["ours"]) for each in records] == [(2, 1, False), (2, 5, False)]
    assert all(each[key] > 0 for each in records for key in ("fused_us", "sum_us", "library_us", "library_norm_us"))
