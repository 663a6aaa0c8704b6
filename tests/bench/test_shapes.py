"""bench/shapes.py: checkpoints of random weights that the loader takes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.models.build import open_model
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.registry import read_config
from asyncllm.text.tokenizer import Tokenizer
from bench.shapes import FORMATS, SHAPES, weights, write_checkpoint, write_tokenizer

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")

REDUCED: dict[str, dict[str, Any]] = {
    "tiny": {},
    "llama-3-8b": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    "llama-3.2-1b": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    "deepseek-v2-lite": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
    },
    "internvl2-8b": {
        "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [56, 56],
        },
    },
    "qwen2.5-vl-7b": {
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5]},
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 44,
            "out_hidden_size": 64,
            "depth": 2,
            "num_heads": 2,
        },
    },
    "qwen2.5-7b": {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "gemma-2-9b": {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "phi-3-mini": {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4},
    },
    "falcon-7b": {"hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 5},
    "gpt-oss-20b": {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "head_dim": 16,
    },
    "qwen3-next-cut": {
        **{"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    },
    "qwen3-30b-a3b": {"hidden_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16},
}
"""Sizes that make every shape quick to write, with all that distinguishes it."""


def reduced(shape: str) -> dict[str, Any]:
    full = SHAPES[shape]
    parts = {key: {**full[key], **each} if isinstance(each, dict) else each for key, each in REDUCED[shape].items()}
    if "text_config" in parts:
        parts["text_config"]["vocab_size"] = 300
        return {**full, **parts}
    return {**full, **parts, "vocab_size": 300}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loader_takes_every_shape(tmp_path: Path, shape: str) -> None:
    config = reduced(shape)
    write_checkpoint(config, tmp_path, max_shard_bytes=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = open_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    assert (model.norm.weight - 1).abs().max() < 0.1
    embedding = model.embed.weight.float()
    assert embedding.std().item() == pytest.approx(0.02, rel=0.1)
    assert embedding.mean().abs() < 0.002
    assert len(embedding.unique()) > 1000


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("shape", ["tiny", "qwen3-30b-a3b"])
def test_the_loader_takes_projections_of_eight_bits(tmp_path: Path, shape: str, number_format: str) -> None:
    config = {**SHAPES[shape], **REDUCED[shape], "vocab_size": 300}
    write_checkpoint(config, tmp_path, max_shard_bytes=40_000, number_format=number_format)
    model = open_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    out: Any = model.get_submodule("layers.0.attn.out")
    assert out.codes.dtype == FORMATS[number_format][0]
    assert (out.codes.float() * out.scales[0][:, None]).std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.norm.weight, torch.ones(64, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-30b-a3b"])
def test_projections_in_awq(tmp_path: Path, shape: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8}
    config = {**SHAPES[shape], **REDUCED[shape], **sizes, "vocab_size": 300}
    if "num_experts" in config:
        config["num_experts"] = 8
    write_checkpoint(config, tmp_path, number_format="awq")
    model = open_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    layer: Any = model.get_submodule("layers.1.attn.out")
    assert layer.method.name == "awq"
    product = layer.method.product(layer, torch.eye(128, dtype=torch.bfloat16)).float()
    # Codes from 0 to 15 less a zero point of 8 have a mean of -0.5.
    assert product.mean().item() == pytest.approx(-0.5 * 0.0043, rel=0.15)
    assert product.std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(ValueError, match="down_proj is 128 x 96"):
        write_checkpoint(
            {**config, "intermediate_size": 96, "moe_intermediate_size": 96}, tmp_path, number_format="awq"
        )


def test_the_shapes_have_the_sizes_that_they_are_named_after() -> None:
    sizes = {name: sum(weight.num_bytes // 2 for weight in weights(config)) for name, config in SHAPES.items()}
    assert sizes["llama-3-8b"] == 8_030_261_248
    assert sizes["llama-3.2-1b"] == 1_235_814_400
    assert sizes["qwen3-30b-a3b"] == 30_532_122_624
    assert sizes["qwen2.5-7b"] == 7_615_616_512
    assert sizes["gemma-2-9b"] == 9_241_705_984
    assert sizes["phi-3-mini"] == 3_821_079_552
    assert sizes["falcon-7b"] == 6_921_720_704
    assert sizes["internvl2-8b"] == 8_075_365_376
    assert sizes["qwen2.5-vl-7b"] == 8_292_166_656
    assert sizes["deepseek-v2-lite"] == 15_706_484_224
    assert 2 * sizes["gpt-oss-20b"] == 13_761_264_768


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    contents = []
    for number, seed in enumerate((5, 5, 6)):
        write_checkpoint(SHAPES["tiny"], tmp_path / str(number), seed=seed)
        contents.append(b"".join(file.read_bytes() for file in sorted((tmp_path / str(number)).glob("*.safetensors"))))
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("vocab_size", [259, 300, 20_000])
def test_every_id_has_a_text(tmp_path: Path, vocab_size: int) -> None:
    write_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == vocab_size
    assert all(tokenizer.token_bytes(id_) for id_ in range(vocab_size))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    text = "Hello, world!\n你好 🙂 <xyz> abcabc"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if vocab_size > 10_000:
        assert len(ids) < len(text.encode())


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="258"):
        write_tokenizer(tmp_path, 258)
    with pytest.raises(ValueError, match="GemmaForCausalLM"):
        list(weights({"architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(ValueError, match="bias"):
        list(weights({**SHAPES["tiny"], "attention_bias": True}))


def test_the_command_writes_a_model_that_answers(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(SHAPES["tiny"]))
    command = [sys.executable, "bench/shapes.py", str(source), str(tmp_path / "model"), "--seed", "3"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert read_config(tmp_path / "model").vocab_size == SHAPES["tiny"]["vocab_size"]
    assert Checkpoint.open(tmp_path / "model").num_bytes == sum(w.num_bytes for w in weights(SHAPES["tiny"]))

    async def answer() -> int:
        async with AsyncEngine(str(tmp_path / "model"), EngineConfig(device_type="cpu")) as engine:
            config = GenerationConfig(max_new_tokens=5, ignore_eos=True)
            return (await engine.generate("Hello", config)).generate_token_len

    assert asyncio.run(answer()) == 5
    refused = subprocess.run([*command[:2], "no-such-shape", "x"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no-such-shape is neither" in refused.stderr
