"""Checkpoints of a few bits: what is loaded is what numpy reads in the same files, and logits are those of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.errors import AsyncLLMError, InvalidCheckpoint, InvalidParameter, UnsupportedModel
from asyncllm.kernels.packed import PLANE, chunk_of, natural, pack_codes, unpack_codes
from asyncllm.layers.linear_method import Weighted
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.load_plan import plan_update
from asyncllm.models.registry import read_config
from asyncllm.quant.packed import Packed
from tests.checkpoints import build_checkpoint
from tests.models.parity import Runner, random_tokens
from tests.quant.formats import Format, awq, change, gptq, is_projection, packed, write, write_config

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}

FORMATS: dict[str, Format] = {
    "awq-gemm-128": awq(128),
    "awq-gemm-32": awq(32),
    "awq-gemm-channel": awq(-1),
    "awq-gemv-64": awq(64, "gemv"),
    "awq-gemv-32": awq(32, "gemv"),
    "gptq-4-128": gptq(4, 128, bias=True),
    "gptq-4-32-asymmetric-v2": gptq(4, 32, symmetric=False, second=True),
    "gptq-4-64-asymmetric": gptq(4, 64, symmetric=False, gptqmodel=True),
    "gptq-4-32-ordered": gptq(4, 32, shuffled=True),
    "gptq-4-channel-ordered": gptq(4, -1, shuffled=True),
    "gptq-4-64-no-g_idx": gptq(4, 64, g_idx=False),
    "gptq-8-32": gptq(8, 32),
    "gptq-8-128-asymmetric-v2-ordered": gptq(8, 128, symmetric=False, second=True, shuffled=True),
    "gptq-3-64": gptq(3, 64),
    "gptq-2-64-v2": gptq(2, 64, symmetric=False, second=True),
    "packed-4-32": packed(4, 32),
    "packed-4-128-asymmetric": packed(4, 128, symmetric=False),
    "packed-4-32-ordered": packed(4, 32, shuffled=True),
    "packed-8-channel": packed(8, -1),
    "packed-8-32-asymmetric": packed(8, 32, symmetric=False),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("dense"), mlp_bias=False, **SIZES)


def open_cpu(folder: Path, **options: Any) -> DecoderLM:
    return open_model(folder, dtype=torch.float32, device=torch.device("cpu"), **options)


def logits_of(model: DecoderLM) -> Tensor:
    runner, tokens = Runner(model, block_size=4), random_tokens(3, 12)
    row = runner.row(tokens)
    runner.step((row, len(tokens) - 1))
    runner.step((row, 1))
    return row.result


def quantized(model: DecoderLM) -> dict[str, Weighted]:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Weighted)}
    return {name: each for name, each in layers.items() if isinstance(each.method, Packed)}


def assert_as_read_by_numpy(folder: Path) -> None:
    """Every weight is that of the plain checkpoint below the folder, bit by bit in float32, and so are the logits."""
    model, plain = open_cpu(folder), open_cpu(folder / "plain")
    layers = quantized(model)
    for name, layer in layers.items():
        method: Any = layer.method
        weight = method.weight(layer)
        for index in (None,) if layer.num_experts is None else range(layer.num_experts):
            one = weight
            if index is not None:
                order = None if weight.order is None else weight.order[index]
                one = weight._replace(
                    words=weight.words[index], scales=weight.scales[index], zeros=weight.zeros[index], order=order
                )
            expected = plain.get_submodule(name).get_parameter("weight")
            torch.testing.assert_close(natural(one, torch.float32), expected if index is None else expected[index])
    assert layers
    difference = (logits_of(model) - logits_of(plain)).abs().max().item()
    assert difference < 1e-4, f"logits differ by {difference:.2e}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_the_one_that_numpy_reads(name: str, dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS[name])
    assert_as_read_by_numpy(folder)
    model = open_cpu(folder)
    assert set(quantized(model)) == {
        f"layers.{layer}.{name}" for layer in range(2) for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    }
    assert model.config.num_parameters == open_cpu(dense).config.num_parameters


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("internlm2", "awq-gemm-32"),
        ("internlm2", "gptq-4-32-ordered"),
        ("internlm2", "packed-4-128-asymmetric"),
        ("phi3", "awq-gemm-32"),
        ("phi3", "awq-gemv-32"),
        ("phi3", "packed-4-32"),
        ("qwen3_moe", "awq-gemm-32"),
        ("qwen3_moe", "gptq-4-32-ordered"),
        ("qwen3_moe", "gptq-8-32"),
        ("gemma2", "packed-8-channel"),
        ("deepseek_v2", "packed-8-channel"),
    ],
)
def test_fused_tensors_grouped_heads_and_experts(family: str, name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 64
    dense = build_checkpoint(family, tmp_path / "dense", **sizes)
    assert_as_read_by_numpy(write(dense, tmp_path / "model", FORMATS[name]))


def nibbles_swapped(tensors: dict[str, Tensor], name: str) -> None:
    words = tensors[name].view(torch.uint8)
    tensors[name] = ((words >> 4) | (words << 4)).view(torch.int32)


def one_more(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name] + 0x11111111


def next_row(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].roll(1, -1)


@pytest.mark.parametrize(
    ("suffix", "changes"), [("qweight", nibbles_swapped), ("qzeros", one_more), ("scales", next_row)]
)
@pytest.mark.parametrize("name", ["awq-gemm-32", "gptq-4-64-asymmetric"])
def test_what_is_read_wrongly_is_noticed(name: str, suffix: str, changes: Any, dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS[name])
    change(folder, lambda tensors: changes(tensors, f"model.layers.0.mlp.down_proj.{suffix}"))
    with pytest.raises(AssertionError):
        assert_as_read_by_numpy(folder)


def test_scales_below_zero(dense: Path, tmp_path: Path) -> None:
    """AutoRound writes them for symmetric weights."""
    folder = write(dense, tmp_path / "model", FORMATS["gptq-4-128"])
    change(folder, replaced(f"{DOWN}.scales", torch.neg))
    change(folder / "plain", replaced(f"{DOWN}.weight", torch.neg))
    assert_as_read_by_numpy(folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_undone_by_unpacking(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (5, 150), dtype=torch.uint8, generator=generator)
    words = pack_codes(codes, bits)
    assert words.shape == (-(-150 // chunk_of(bits)), 5, PLANE)
    assert torch.equal(unpack_codes(words, bits, 150), codes)
    # Value i of word j is feature 32 i + j of its chunk.
    for chunk, row, j, i in [(0, 0, 0, 0), (0, 4, 31, 1), (1, 2, 5, 0)]:
        value = int(words[chunk, row, j]) >> (bits * i) & ((1 << bits) - 1)
        assert value == codes[row, chunk * chunk_of(bits) + PLANE * i + j]


DOWN = "model.layers.1.mlp.down_proj"
K_PROJ = "model.layers.0.self_attn.k_proj"


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, made_of: Any) -> Any:
    return lambda tensors: tensors.update({name: made_of(tensors[name])})


DAMAGED: dict[str, tuple[str, Any, type[AsyncLLMError], str]] = {
    "scales": ("awq-gemm-32", without(f"{DOWN}.scales"), InvalidCheckpoint, r"down\.scales"),
    "qzeros": ("gptq-4-128", without(f"{DOWN}.qzeros"), InvalidCheckpoint, r"down\.qzeros"),
    "qweight": ("awq-gemm-32", without(f"{DOWN}.qweight"), InvalidCheckpoint, r"down\.qweight"),
    "groups": ("gptq-4-32-ordered", without(f"{DOWN}.g_idx"), InvalidCheckpoint, r"down\.g_idx"),
    "shape": ("packed-4-32", replaced(f"{DOWN}.weight_shape", lambda t: t + 1), InvalidCheckpoint, "weight_shape is"),
    "rows": (
        "awq-gemm-32",
        replaced(f"{DOWN}.scales", lambda t: t[:-1]),
        InvalidCheckpoint,
        rf"{DOWN}\.scales' has sh",
    ),
    "type": (
        "awq-gemm-32",
        replaced(f"{DOWN}.qweight", torch.Tensor.long),
        UnsupportedModel,
        rf"{DOWN}\.qweight' is I",
    ),
    "infinite": ("awq-gemm-32", replaced(f"{DOWN}.scales", lambda t: t / 0), InvalidCheckpoint, rf"{DOWN}.*finite"),
    "order": ("gptq-4-128", replaced(f"{DOWN}.g_idx", lambda t: t.flip(0)), InvalidCheckpoint, f"{DOWN}.*desc_act"),
    "range": ("gptq-4-32-ordered", replaced(f"{DOWN}.g_idx", lambda t: t + 1), InvalidCheckpoint, f"{DOWN}.*one size"),
    "sizes": (
        "gptq-4-32-ordered",
        replaced(f"{DOWN}.g_idx", lambda t: t.clamp(min=1)),
        InvalidCheckpoint,
        f"{DOWN}.*one size",
    ),
    "orders": (
        "gptq-4-32-ordered",
        replaced(f"{K_PROJ}.g_idx", lambda t: t.roll(1)),
        InvalidCheckpoint,
        "other projec",
    ),
    "bias": (
        "gptq-4-128",
        lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(128)}),
        InvalidCheckpoint,
        rf"{DOWN}\.bias.*not zero",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_tensors_are_named(what: str, dense: Path, tmp_path: Path) -> None:
    name, changes, error, says = DAMAGED[what]
    folder = write(dense, tmp_path / "model", FORMATS[name])
    change(folder, changes)
    with pytest.raises(error, match=says):
        open_cpu(folder)


def test_zero_points_that_the_writer_damaged_are_refused(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", gptq(4, 64, symmetric=False))
    change(folder, replaced(f"{DOWN}.qzeros", lambda tensor: tensor | 15))
    with pytest.raises(InvalidCheckpoint, match=rf"{DOWN}.*gptq_v2"):
        open_cpu(folder)


@pytest.mark.parametrize(
    ("name", "changes", "error", "says"),
    [
        ("awq-gemm-32", {"bits": 5}, UnsupportedModel, "bits = 5"),
        ("awq-gemm-32", {"bits": "4"}, InvalidCheckpoint, "bits = '4'"),
        ("awq-gemm-32", {"bits": True}, InvalidCheckpoint, "bits = True"),
        ("awq-gemm-32", {"version": "gemv_fast"}, UnsupportedModel, "version = 'gemv_fast'"),
        ("awq-gemm-32", {"group_size": 0}, UnsupportedModel, "group_size = 0"),
        ("awq-gemm-32", {"group_size": -2}, UnsupportedModel, "group_size = -2"),
        ("awq-gemm-32", {"group_size": 96}, InvalidCheckpoint, "_proj.*group_size = 96 does not divide 128"),
        ("awq-gemm-32", {"group_size": 64}, InvalidCheckpoint, r"\[8, 16\], and config.json asks for \[4, 16\]"),
        ("awq-gemm-32", {"zero_point": False}, UnsupportedModel, "zero_point"),
        ("awq-gemm-32", {"quant_method": "quip"}, UnsupportedModel, "quant_method = 'quip'.*awq"),
        ("awq-gemm-32", {"quant_method": "aqlm"}, UnsupportedModel, "aqlm.*bfloat16"),
        (
            "awq-gemm-32",
            {"quant_method": "gptq"},
            InvalidCheckpoint,
            r"qweight.*\[256, 16\], and config.json asks for \[32",
        ),
        ("gptq-4-128", {"bits": 5}, UnsupportedModel, "bits = 5"),
        ("gptq-4-128", {"checkpoint_format": "marlin"}, UnsupportedModel, "checkpoint_format = 'marlin'"),
        ("gptq-4-128", {"desc_act": "no"}, InvalidCheckpoint, "desc_act = 'no'"),
        ("packed-4-32", {"format": "marlin-24"}, UnsupportedModel, "format = 'marlin-24'"),
        ("packed-4-32", {"transform_config": {"R1": 1}}, UnsupportedModel, "transform_config"),
        ("packed-4-32", {"config_groups": {}}, InvalidCheckpoint, "config_groups"),
        ("packed-4-32", {"config_groups": {"g": {"targets": ["re:.*up_proj"]}}}, InvalidCheckpoint, "num_bits"),
        ("packed-4-32", {"config_groups": {"g": {"targets": ["re:*up"]}}}, InvalidCheckpoint, "regular expression"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(
    name: str, changes: dict[str, Any], error: type[AsyncLLMError], says: str, dense: Path, tmp_path: Path
) -> None:
    fmt = FORMATS[name]
    folder = write(dense, tmp_path / "model", fmt)
    write_config(folder, {**fmt.config, **changes})
    with pytest.raises(error, match=says):
        open_cpu(folder)


def test_words_that_sizes_do_not_fill(tmp_path: Path) -> None:
    dense = build_checkpoint("llama", tmp_path / "dense", **{**SIZES, "intermediate_size": 68})
    folder = write(dense, tmp_path / "model", awq(32), lambda name: is_projection(name) and "mlp" not in name)
    change(folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.qweight": torch.zeros(128, 8).int()}))
    with pytest.raises((InvalidCheckpoint, UnsupportedModel), match="gate_proj"):
        open_cpu(folder)


@pytest.mark.parametrize(
    ("family", "sizes", "name", "says"),
    [
        (
            "internlm2",
            {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2},
            "awq-gemm-32",
            r"wqkv\.qweight' has 2 pieces of each.* and 2 does not divide the 12 and 3 and 3 entries",
        ),
        (
            "internlm2",
            {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2},
            "gptq-4-32-ordered",
            r"wqkv\.qzeros' has 2 pieces.* in which 96 and 24 and 24 output features",
        ),
        (
            "qwen3_next",
            {"hidden_size": 128, "num_attention_heads": 8, "head_dim": 20, "shared_expert_intermediate_size": 64},
            "awq-gemm-32",
            r"q_proj\.qweight' has 8 pieces.* does not divide the 20 and 20 entries",
        ),
    ],
)
def test_words_of_two_heads(family: str, sizes: dict[str, int], name: str, says: str, tmp_path: Path) -> None:
    dense = build_checkpoint(
        family, tmp_path / "dense", **{"intermediate_size": 128, "moe_intermediate_size": 64, **sizes}
    )
    with pytest.raises(UnsupportedModel, match=says):
        open_cpu(write(dense, tmp_path / "model", FORMATS[name]))


def test_config_and_files_that_do_not_belong_together(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS["awq-gemm-32"])
    write_config(folder / "plain", FORMATS["awq-gemm-32"].config)
    with pytest.raises(InvalidCheckpoint, match="no tensor that is"):
        open_cpu(folder / "plain")
    write_config(folder, None)
    with pytest.raises(UnsupportedModel, match=r"qweight' is I32.*quantization_config"):
        open_cpu(folder)


def test_the_format_that_is_asked_for(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS["awq-gemm-32"])
    expected = logits_of(open_cpu(folder))
    assert torch.equal(logits_of(open_cpu(folder, model_format="awq")), expected)
    for wrong in ("gptq", "hf", "compressed-tensors"):
        with pytest.raises(InvalidParameter, match=f"model_format is '{wrong}'.*says 'awq'"):
            read_config(folder, model_format=wrong)
    with pytest.raises(InvalidParameter, match=r"model_format is 'awq'.*says nothing"):
        read_config(dense, model_format="awq")
    assert read_config(dense, model_format="hf").hidden_size == 128

    # Files of before config.json had the entry.
    write_config(folder, None)
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(str(old).replace("'", '"').replace("True", "true"))
    assert torch.equal(logits_of(open_cpu(folder)), expected)


def test_half_precision_scales_stay_what_they_are(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS["awq-gemm-32"])
    model = open_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    layer = quantized(model)["layers.0.mlp.down"]
    assert layer.get_parameter("scales").dtype == torch.float16
    assert np.isfinite(logits_of(open_cpu(folder)).numpy()).all()


def test_quantized_weights_are_not_updated_in_parts(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS["gptq-4-128"])
    model = open_cpu(folder)
    before = logits_of(model)
    for name in (f"{DOWN}.qweight", f"{DOWN}.weight"):
        with pytest.raises(InvalidParameter, match=r"layers\.1\.mlp\.down, whose weight is quantized"):
            plan_update(model, {name: torch.zeros(32, 128)}, model.weight_map)
    assert torch.equal(logits_of(model), before)
    plan_update(model, {"model.norm.weight": torch.zeros(128)}, model.weight_map)()
    assert not logits_of(model).any()
