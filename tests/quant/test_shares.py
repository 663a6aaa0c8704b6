"""Quantized weights divided among ranks: together they give the logits of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.errors import UnsupportedModel
from asyncllm.layers.linear_method import Weighted
from asyncllm.models.decoder import DecoderLM
from tests.checkpoints import build_checkpoint
from tests.quant.formats import Eight, Format, awq, eight, fp8, gptq, packed, smooth_quant, write
from tests.quant.test_packed_weights import assert_as_read_by_numpy, logits_of, open_cpu
from tests.ranks.threads import ThreadGroup, in_ranks

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
FORMATS: dict[str, Format | Eight] = {
    "awq-gemm-128": awq(128),
    "awq-gemm-32": awq(32),
    "awq-gemv-32": awq(32, "gemv"),
    "awq-channel": awq(-1),
    "gptq-4-64-bias": gptq(4, 64, bias=True),
    "gptq-8-128-asymmetric": gptq(8, 128, symmetric=False, second=True),
    "gptq-3-32": gptq(3, 32),
    "packed-4-256-asymmetric": packed(4, 256, symmetric=False),
    "fp8-tensor-static": fp8("tensor", static=True),
    "fp8-block": fp8("block"),
    "smooth-int8": smooth_quant(),
    "compressed-fp8-channel": eight("e4m3", "channel"),
}


def unrounded(model: DecoderLM) -> Tensor:
    """Logits with activations as they are: a rank's scale for a token is that of its own features."""
    for module in model.modules():
        if isinstance(module, Weighted):
            module.method = module.method.batch_invariant()
    return logits_of(model)


def assert_shares_are_the_whole(folder: Path, **options: Any) -> None:
    with torch.inference_mode():
        whole = unrounded(open_cpu(folder, **options))
    shares = in_ranks(2, lambda group: unrounded(open_cpu(folder, group=group, **options)))
    assert torch.equal(shares[0], shares[1])
    torch.testing.assert_close(shares[0], whole, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, and rows of the output embedding that two ranks do not have alike."""
    return build_checkpoint("llama", tmp_path_factory.mktemp("dense"), vocab_size=321, attention_bias=True, **SIZES)


@pytest.mark.parametrize("name", FORMATS)
def test_two_ranks_give_the_logits_of_one(name: str, dense: Path, tmp_path: Path) -> None:
    assert_shares_are_the_whole(write(dense, tmp_path / "model", FORMATS[name]))


def test_plain_weights_are_rounded_as_one_rank_rounds_them(dense: Path) -> None:
    assert_shares_are_the_whole(dense, model_format="fp8")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("internlm2", "awq-gemm-128"),
        ("phi3", "gptq-3-32"),
        ("glm4", "awq-gemm-32"),
        ("qwen3_moe", "awq-gemv-32"),
        ("qwen3_moe", "fp8-block"),
        ("deepseek_v3", "fp8-block"),
        ("deepseek_v2", "awq-channel"),
    ],
)
def test_fused_tensors_turned_heads_and_experts(family: str, name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(SIZES)
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 256, "head_dim": 64, "mlp_only_layers": []}
    if family == "glm4":
        sizes |= {"head_dim": 32}
    if family == "deepseek_v3":
        sizes |= {"moe_intermediate_size": 256, "v_head_dim": 64}
    folder = write(build_checkpoint(family, tmp_path / "dense", **sizes), tmp_path / "model", FORMATS[name])
    if isinstance(FORMATS[name], Format):
        assert_as_read_by_numpy(folder)
    assert_shares_are_the_whole(folder)


def test_whole_experts_for_ranks_are_refused(tmp_path: Path) -> None:
    dense = build_checkpoint("qwen3_moe", tmp_path / "dense", **SIZES, moe_intermediate_size=256, mlp_only_layers=[])
    model = open_cpu(write(dense, tmp_path / "model", awq(32)))
    experts = next(module for module in model.modules() if isinstance(module, Weighted) and module.num_experts)

    def divide(group: ThreadGroup) -> None:
        experts.divide_experts(group)

    with pytest.raises(UnsupportedModel, match="ep=2: ranks cannot hold whole experts of awq weights"):
        in_ranks(2, divide)


@pytest.mark.parametrize(
    ("fmt", "sizes", "says"),
    [
        (gptq(4, 32, shuffled=True), {}, r"desc_act.*Use tp=1"),
        (awq(32), {"intermediate_size": 288}, "would have 144, and its groups no multiple of 32"),
        (fp8("block"), {"intermediate_size": 384}, "would have 192. Use a tp"),
    ],
)
def test_what_cannot_be_divided_is_refused(fmt: Format | Eight, sizes: Any, says: str, tmp_path: Path) -> None:
    folder = write(build_checkpoint("llama", tmp_path / "dense", **{**SIZES, **sizes}), tmp_path / "model", fmt)
    with pytest.raises(UnsupportedModel, match=says):
        in_ranks(2, lambda group: open_cpu(folder, group=group))
