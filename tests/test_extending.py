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

from asyncllm.models import registry
from asyncllm.models.registry import open_model
from tests.models.parity import Case, Runner, folder_of, random_tokens

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
FAMILY, MODULE, OP, LAUNCHER, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


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


def test_model(add_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its monitor thread outlives the test
    known = dict(registry.families())
    monkeypatch.setattr(registry, "_FAMILIES", known)
    monkeypatch.setattr(registry, "families", lambda: known)
    family = add_file("asyncllm.models.vaultgemma", FAMILY).VaultGemma
    fields = dict(family.tiny)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    runner = Runner(open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu")), block_size=5)
    row = runner.row(random_tokens(1, 40))
    runner.step((row, 13))
    runner.step((row, 23))
    runner.decode(row, 40)
    with torch.inference_mode():
        expected = theirs(torch.tensor([row.tokens])).logits[0]
    assert (row.result - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


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
