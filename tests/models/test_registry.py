"""From a folder to a model: families are found, weights loaded, and what does not fit is refused before it hurts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.errors import InvalidCheckpoint, ModelNotFound
from asyncllm.kernels import PagedKV
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import families, open_model, register
from tests.checkpoints import build_checkpoint
from tests.models.parity import FAMILIES, Runner, random_tokens

CPU = torch.device("cpu")


def open_cpu(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> DecoderLM:
    return open_model(folder, dtype=dtype, device=CPU, **settings)


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_every_architecture_of_the_issue_is_registered() -> None:
    assert set(families()) == {
        "Gemma2ForCausalLM",
        "InternLM2ForCausalLM",
        "LLaMAForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }


def test_two_families_cannot_share_an_architecture() -> None:
    class Other(DecoderLM):
        pass

    with pytest.raises(ValueError, match="LlamaForCausalLM is registered by"):
        register("LlamaForCausalLM")(Other)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_and_frozen(family: str, tmp_path: Path) -> None:
    model = open_cpu(build_checkpoint(family, tmp_path))
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert model.config.num_parameters == stored
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Close where the logits are decided: rounding moves them, but not by a fifth of their spread."""
    build_checkpoint(family, tmp_path, dtype=dtype)
    results = []
    for each in (torch.float32, dtype):
        runner = Runner(open_cpu(tmp_path, each), block_size=16)
        runner.caches = [PagedKV.over(torch.stack(cache[:2]).to(each)) for cache in runner.caches]
        row = runner.row(random_tokens(1, 24), prompt_len=20)
        runner.step((row, 20))
        runner.decode(row, 24)
        results.append(row.result)
    error = (results[0] - results[1].float()).std() / results[0].std()
    assert error < 0.2, error


def test_a_tied_model_ignores_a_stored_head(tmp_path: Path) -> None:
    build_checkpoint("qwen3", tmp_path)
    expected = open_cpu(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = open_cpu(tmp_path)
    x = torch.ones(1, model.config.hidden_size)
    assert torch.equal(model.logits(x), expected.logits(x))


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_cpu(tmp_path).config.num_parameters == sum(t.numel() for t in tensors.values()) - 8


def test_missing_bias_is_named(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path, attention_bias=False)
    edit(tmp_path, attention_bias=True)
    with pytest.raises(InvalidCheckpoint, match=r"layers\.0\.attn\.qkv\.bias\[q\]"):
        open_cpu(tmp_path)


def test_surplus_bias_is_named(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    edit(tmp_path, attention_bias=False)
    with pytest.raises(InvalidCheckpoint, match=r"self_attn\.[a-z]_proj\.bias"):
        open_cpu(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**24, "hidden_size": 2**24, "num_attention_heads": 4},
        {"intermediate_size": 2**24},
        {"num_hidden_layers": 1000},
        {"head_dim": 2**14},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sizes_beyond_the_checkpoint_are_refused_before_memory_is_asked_for(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    build_checkpoint("llama", tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(InvalidCheckpoint, match="the safetensors files hold 103,"):
        open_cpu(tmp_path)


def test_weights_must_be_there(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises((InvalidCheckpoint, ModelNotFound)):
        open_cpu(tmp_path)
