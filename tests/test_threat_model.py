"""The tests that THREAT_MODEL.md names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def names_in(file: Path) -> set[str]:
    """Names of the file's tests, with the class in front where there is one."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inside if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


def test_every_proof_exists_and_every_threat_has_one() -> None:
    text = (ROOT / "THREAT_MODEL.md").read_text(encoding="utf-8")
    proofs = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", text)
    assert len(proofs) > 30
    assert [f"{file}::{name}" for file, name in proofs if name not in names_in(ROOT / file)] == []
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert [row for row in rows if "`tests/" not in row and row != "| threat | measure | proof |"] == []
