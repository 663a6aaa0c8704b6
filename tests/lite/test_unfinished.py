"""Runs that were ended: a killed process leaves what is finished, and the same run comes to the same files."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import lite
from asyncllm.errors import ModelError
from asyncllm.lite.unfinished import unfinished
from tests.checkpoints import build_checkpoint
from tests.models.parity import random_tokens

TEXTS = [random_tokens(seed, 100) for seed in range(11)]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}

KILLED = """
import os, signal, sys
from asyncllm import lite

def progress(done, count):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

texts = [[int(token) for token in text.split()] for text in sys.argv[3].split(",")]
lite.auto_gptq(sys.argv[1], sys.argv[2], texts=texts, w_group_size=32, progress=progress)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("source"), mlp_bias=False, **SIZES)


def test_a_killed_process_goes_on_behind_its_last_layer(source: Path, tmp_path: Path) -> None:
    folder, left = tmp_path / "written", tmp_path / ".written.unfinished"
    texts = ",".join(" ".join(map(str, text)) for text in TEXTS)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source), str(folder), texts], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == [left.name]
    # As if it had been killed in the middle of the next layer too.
    (left / "layer-2").mkdir()
    (left / "layer-2" / "model.safetensors").write_bytes(b"half of it")
    done: list[int] = []
    options: dict[str, Any] = {"texts": TEXTS, "w_group_size": 32}
    report = lite.auto_gptq(source, str(folder), **options, progress=lambda layer, count: done.append(layer))
    assert done == [3]
    assert [each.name for each in tmp_path.iterdir()] == ["written"]
    whole = lite.auto_gptq(source, str(tmp_path / "whole"), **options)
    assert report.comparison == whole.comparison
    assert (folder / "config.json").read_bytes() == (tmp_path / "whole" / "config.json").read_bytes()
    found, expected = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_was_begun_otherwise_starts_anew(source: Path, tmp_path: Path) -> None:
    done: list[int] = []

    def interrupted(layer: int, count: int) -> None:
        done.append(layer)
        if len(done) == 2:
            raise KeyboardInterrupt

    runs: list[dict[str, Any]] = [
        {"texts": TEXTS},
        {"texts": TEXTS, "quant_dtype": "fp8"},
        {"texts": TEXTS[1:], "quant_dtype": "fp8"},
        {"texts": TEXTS[1:], "quant_dtype": "fp8", "batch_size": 2},
    ]
    for options in runs:
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            lite.smooth_quant(source, str(tmp_path / "written"), **options, progress=interrupted)
        assert done == [1, 2]
    config = source / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        lite.smooth_quant(source, str(tmp_path / "written"), **runs[-1], progress=interrupted)
    assert done == [1, 2]
    done.clear()
    lite.smooth_quant(source, str(tmp_path / "written"), **runs[-1], progress=lambda layer, count: done.append(layer))
    assert done == [3]


def test_two_do_not_write_one_folder(source: Path, tmp_path: Path) -> None:
    with unfinished(tmp_path / "written", "another"), pytest.raises(ModelError, match="Another process"):
        lite.blocked_fp8(source, str(tmp_path / "written"))
    assert list(tmp_path.iterdir()) == []
