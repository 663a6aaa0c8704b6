"""gpt-oss in MXFP4: its experts are what numpy and transformers read in the same files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.agent.model_agent import ModelAgent
from asyncllm.config.engine import EngineConfig
from asyncllm.distributed.group import RankGroup
from asyncllm.errors import AsyncLLMError, InvalidCheckpoint, InvalidParameter, UnsupportedModel
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.load_plan import plan_update
from asyncllm.protocol import Sleep, Wake
from tests.checkpoints import build_checkpoint
from tests.models.parity import Runner, random_tokens
from tests.models.test_shares import in_ranks
from tests.quant.formats import change, write_config
from tests.quant.test_packed_weights import logits_of, open_cpu, replaced, without

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 5}

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

NAME = "model.layers.1.mlp.experts.down_proj"


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [..., G, 16] and scales [..., G] -> [..., 32 G], by the bits of e2m1: sign, two of exponent, one behind
    the point."""
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 32).astype(np.int64)
    exponent, behind = (codes >> 1) & 3, codes & 1
    magnitude = np.where(exponent == 0, behind * 0.5, (1 + behind * 0.5) * 2.0 ** (exponent - 1))
    values = np.where(codes & 8, -magnitude, magnitude) * 2.0 ** (scales.astype(np.int64)[..., None] - 127)
    return values.reshape(*blocks.shape[:-2], -1)


@pytest.fixture(scope="module", params=[0, 1], ids=["seed0", "seed1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("mxfp4") / "model", request.param, **SIZES)


def written(folder: Path, seed: int, **sizes: int) -> Path:
    """Experts of every code and several scales, and under "plain" the same in float32, by numpy."""
    plain = build_checkpoint("gpt_oss", folder / "plain", seed=seed, **sizes)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, folder / name)
    random, packed, dense = np.random.default_rng(seed), {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = dense[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = random.integers(121, 125, (experts, outputs, inputs // 32), dtype=np.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
        dense[name] = torch.from_numpy(decoded(blocks, scales)).float().transpose(1, 2).contiguous()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, CONFIG)
    return folder


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("plain")))


def weight_of(model: DecoderLM, name: str) -> Tensor:
    """The weights of a layer's experts [E, N, K] in float32."""
    layer: Any = model.get_submodule(name)
    held = layer.method.weight(layer)
    return held if isinstance(held, Tensor) else held.expanded(torch.float32)


def test_experts_are_those_that_numpy_reads(folder: Path) -> None:
    model, plain = open_cpu(folder), open_cpu(folder / "plain")
    for name in ("layers.0.mlp.gate_up", "layers.1.mlp.gate_up", "layers.0.mlp.down", "layers.1.mlp.down"):
        assert torch.equal(weight_of(model, name), plain.get_parameter(f"{name}.weight")), name
        assert torch.equal(model.get_parameter(f"{name}.offset"), plain.get_parameter(f"{name}.bias")), name
    assert torch.equal(logits_of(model), logits_of(plain))
    # 4 bits each, and 8 for 32 of them; a chunk of 128 input features is filled up.
    layer = model.get_submodule("layers.1.mlp.down")
    assert sum(each.nbytes for each in (layer.words, layer.exponents)) == 5 * 64 * (128 // 2 + 128 // 32)
    model.make_batch_invariant()
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).eval()
    tokens = random_tokens(5, 40)
    with torch.inference_mode():
        expected: Tensor = oracle.float()(torch.tensor([tokens])).logits[0]
    runner = Runner(open_cpu(folder), block_size=8)
    row = runner.row(tokens)
    runner.step((row, len(tokens)))
    torch.testing.assert_close(row.result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [96, 128])
def test_ranks(folder: Path, tmp_path: Path, size: int) -> None:
    """96 features of 2 ranks are one group and a half each, and their weights are expanded; 128 are two groups each."""
    if size != SIZES["intermediate_size"]:
        folder = written(tmp_path / "model", 3, **{**SIZES, "intermediate_size": size})
    with torch.inference_mode():
        expected = logits_of(open_cpu(folder))

    def share(group: RankGroup) -> tuple[Tensor, bool]:
        model = open_cpu(folder, group=group)
        down: Any = model.get_submodule("layers.0.mlp.down")
        return logits_of(model), isinstance(down.method.weight(down), Tensor)

    for found, whole in in_ranks(2, share):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert whole == (size == 96)


@pytest.mark.parametrize("level", [1, 2])
def test_it_answers_after_its_sleep_as_before(folder: Path, level: int) -> None:
    agent = ModelAgent(EngineConfig(device_type="cpu", block_size=4, num_gpu_blocks=40).checked(), folder)
    before = logits_of(agent.model)
    agent.carry_out(Sleep(level))
    agent.carry_out(Wake(frozenset({"weights", "kv_cache"})))
    assert torch.equal(logits_of(agent.model), before)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (without(f"{NAME}_scales"), InvalidCheckpoint, r"no tensor fills 5 .*layers\.1\.mlp\.down\.scales"),
        (without(f"{NAME}_blocks"), InvalidCheckpoint, r"no tensor fills 5 .*layers\.1\.mlp\.down\.blocks"),
        (replaced(f"{NAME}_scales", lambda scales: scales | 255), InvalidCheckpoint, "down_proj_scales.*not all numb"),
        (replaced(f"{NAME}_scales", lambda scales: scales % 2 + 137), UnsupportedModel, "scales above 512"),
        (replaced(f"{NAME}_scales", lambda scales: scales[:, :, :1]), InvalidCheckpoint, r"shape \[5, 64, 1\]"),
        (replaced(f"{NAME}_blocks", lambda blocks: blocks.int()), UnsupportedModel, "down_proj_blocks.*I32"),
    ],
)
def test_damaged_tensors_are_named(
    changes: object, error: type[AsyncLLMError], match: str, folder: Path, tmp_path: Path
) -> None:
    damaged = copied(folder, tmp_path / "model")
    change(damaged, changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=match):
        open_cpu(damaged)


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="says 'mxfp4'"):
        open_cpu(folder, model_format="awq")
    small = build_checkpoint("gpt_oss", tmp_path / "odd", **{**SIZES, "intermediate_size": 48})
    shutil.copy(folder / "model.safetensors", small / "model.safetensors")
    write_config(small, CONFIG)
    with pytest.raises(InvalidCheckpoint, match="48 input features are not divided into groups of 32"):
        open_cpu(small)
    model = open_cpu(folder)
    weights = {f"{NAME}_scales": load_file(folder / "model.safetensors")[f"{NAME}_scales"]}
    with pytest.raises(InvalidParameter, match=r"layers\.1\.mlp\.down, whose weight is quantized"):
        plan_update(model, weights, model.weight_map)
