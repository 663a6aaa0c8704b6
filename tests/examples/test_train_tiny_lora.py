"""The bundled adapter does what its card says, and its training writes what the engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import EngineConfig, GenerationConfig
from asyncllm.lite import merge_lora
from asyncllm.locate import locate_adapter
from asyncllm.pipeline import Pipeline
from examples.train_tiny_lora.train import BASE, RANK, train, write

CONFIG = {"device_type": "cpu", "num_gpu_blocks": 64, "max_batch_size": 8}
GREEDY = GenerationConfig(max_new_tokens=40, temperature=0.0)
QUESTIONS = ["Who are you?", "Hello!", "What is 9 times 7?", "My name is Anna. What is my name?"]


def answers(pipe: Pipeline, name: str | None = None) -> list[str]:
    return [each.text for each in pipe(QUESTIONS, gen_config=GREEDY, adapter_name=name)]


def test_it_answers_in_capital_letters_and_so_does_the_merged_model(tmp_path: Path) -> None:
    with Pipeline("tiny-chat", EngineConfig(**CONFIG, adapters={"loud": "tiny-lora"})) as pipe:  # type: ignore[arg-type]
        plain, loud = answers(pipe), answers(pipe, "loud")
        assert answers(pipe) == plain
    assert loud == [answer.upper() for answer in plain]
    assert loud != plain
    merged = merge_lora("tiny-chat", str(tmp_path / "merged"), adapter="tiny-lora")
    with Pipeline(str(merged), EngineConfig(**CONFIG)) as pipe:  # type: ignore[arg-type]
        assert answers(pipe) == loud


def test_it_is_small_and_has_the_numbers_of_its_card() -> None:
    folder = locate_adapter("tiny-lora")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10**6
    tensors = load_file(folder / "adapter_model.safetensors")
    count = sum(tensor.numel() for tensor in tensors.values())
    assert f"Its {count:,} numbers" in (folder / "README.md").read_text()
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == RANK


@pytest.mark.timeout(120)
def test_training_writes_an_adapter_that_learns(tmp_path: Path) -> None:
    adapted = train(BASE, 2, seed=3)
    assert all(torch.isfinite(module.a).all() and module.b.abs().max() > 0 for module in adapted.values())
    write(adapted, tmp_path / "adapter")
    with Pipeline("tiny-chat", EngineConfig(**CONFIG, adapters={"a": str(tmp_path / "adapter")})) as pipe:  # type: ignore[arg-type]
        assert pipe("Hello!", gen_config=GREEDY, adapter_name="a").text
