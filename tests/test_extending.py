"""The worked examples of docs/extending.md: their files, taken from the page, do what it says."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.models.parity import Case, folder_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncllm"
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FAMILY, MODULE, MAP, OP, LAUNCHER, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def add_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that imports a text as a module of the package, until the test ends."""

    def add(name: str, text: str) -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), last, module, raising=False)
        spec.loader.exec_module(module)
        return module

    return add


def test_model() -> None:
    """The page shows the family's file, which tests/models hold to transformers."""
    assert (PACKAGE / "models" / "vaultgemma.py").read_text(encoding="utf-8") == FAMILY


def test_one_module_beside_the_original() -> None:
    names: dict[str, Any] = {}
    exec(MODULE, names)
    assert names["differ"](folder_of(Case("llama", "default"))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op(add_file, dtype: torch.dtype) -> None:
    op = add_file("asyncllm.kernels.hard_swish", OP)
    launchers = add_file("asyncllm.kernels.triton.hard_swish", LAUNCHER)
    test = add_file("tests.hard_swish", TEST).test_hard_swish
    for module in (op, launchers):
        test(module, dtype)
