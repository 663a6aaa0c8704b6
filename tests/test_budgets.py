"""No file grows past what one sitting can read."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("asyncllm", "tests", "bench", "examples")


def limit(path: Path) -> int:
    return 700 if "kernels/triton" in path.as_posix() else 500


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_is_within_its_budget(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit(path)
