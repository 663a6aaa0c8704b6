"""`use_logn_attn`: queries beyond the trained length are multiplied by log(place) / log(length)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncllm.errors import UnsupportedFeature
from asyncllm.layers.rotary import LogScaling
from asyncllm.models.build import open_model
from asyncllm.models.registry import read_config
from tests.checkpoints import build_checkpoint
from tests.models.parity import PROMPT, TOKENS, Runner, random_tokens

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
TRAINED = 32


def opened(folder: Path, **settings: Any) -> Any:
    return open_model(folder, dtype=torch.float32, device=torch.device("cpu"), use_logn_attn=True, **settings)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_logits_are_those_of_the_formula(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    build_checkpoint(family, tmp_path, rope_parameters=LINEAR, max_position_embeddings=TRAINED)
    tokens = random_tokens(5)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    factors = torch.tensor([math.log(place, TRAINED) if place > TRAINED else 1.0 for place in range(1, TOKENS + 1)])

    def scale(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        # [1, T, heads * D], or behind its norm [1, T, heads, D].
        return output * factors.view(-1, *(1 for _ in range(output.ndim - 2)))

    plain = oracle(torch.tensor([tokens])).logits[0]
    for name, module in oracle.named_modules():
        if name.endswith("q_norm" if family == "qwen3" else "q_proj"):
            module.register_forward_hook(scale)
    expected = oracle(torch.tensor([tokens])).logits[0]
    assert (plain - expected)[TRAINED:].abs().max() > 5e-3

    runner = Runner(opened(tmp_path), block_size=16)
    row = runner.row(tokens)
    runner.step((row, 48))
    runner.step((row, PROMPT - 48))
    runner.decode(row, TOKENS)
    torch.testing.assert_close(row.result, expected, atol=1e-4, rtol=0)


def test_length_is_that_before_rotary_scaling(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path, max_position_embeddings=TRAINED)
    config = read_config(tmp_path, rope_scaling_factor=4.0, use_logn_attn=True)
    assert (config.query_scaling, config.max_position) == (LogScaling(length=TRAINED), 4 * TRAINED)
    assert read_config(tmp_path, rope_scaling_factor=4.0).query_scaling is None


def test_a_model_that_scales_by_itself_stays_as_it_is(tmp_path: Path) -> None:
    build_checkpoint("qwen", tmp_path)
    assert read_config(tmp_path, use_logn_attn=True) == read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "entries", "why"),
    [
        ("deepseek_v2", {}, "LatentAttention"),
        ("lfm2", {}, "ShortConvolution"),
        ("qwen3_next", {}, "take no scale"),
        ("llama4", {"attn_temperature_tuning": False}, "within chunks"),
        ("ministral3", {}, "a way of its own"),
        ("llama", {"max_position_embeddings": 1}, "trained on 1 position"),
    ],
)
def test_refused_where_layers_have_no_use_for_it(
    tmp_path: Path, family: str, entries: dict[str, Any], why: str
) -> None:
    build_checkpoint(family, tmp_path)
    with pytest.raises(UnsupportedFeature, match=why) as caught:
        opened(tmp_path, hf_overrides=entries)
    assert caught.value.param == "use_logn_attn"
