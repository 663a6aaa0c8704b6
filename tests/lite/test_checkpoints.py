"""What the tools write: bits as numpy packs them, weights as numpy reads them, found by config.json alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.lite import TOOLS
from asyncllm.quant.awq import encode_gemm
from asyncllm.quant.compressed import encode_packed
from asyncllm.quant.gptq import encode_gptq
from asyncllm.quant.packed import Decoded
from tests.checkpoints import build_checkpoint
from tests.models.parity import random_tokens
from tests.quant import formats, test_packed_weights, test_scaled_weights
from tests.quant.formats import Eight, Format, Tensors
from tests.quant.test_packed_weights import logits_of, open_cpu

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
TEXTS = [random_tokens(seed, 100) for seed in range(12)]

WRITTEN: dict[str, tuple[str, dict[str, Any], Format | Eight]] = {
    "awq": ("auto_awq", {"w_group_size": 64}, formats.awq(64)),
    "awq-symmetric": ("auto_awq", {"w_sym": True}, formats.awq(128)),
    "gptq": ("auto_gptq", {}, formats.gptq(4, 128, symmetric=False)),
    "gptq-asymmetric-8": (
        "auto_gptq", {"w_sym": False, "w_bits": 8, "w_group_size": -1}, formats.gptq(8, -1, symmetric=False)
    ),
    "gptq-2": ("auto_gptq", {"w_sym": True, "w_bits": 2, "w_group_size": 32}, formats.gptq(2, 32)),
    "awq-compressed": (
        "auto_awq",
        {"checkpoint_format": "compressed-tensors", "w_group_size": 32},
        formats.packed(4, 32, symmetric=False),
    ),
    "gptq-compressed": ("auto_gptq", {"checkpoint_format": "compressed-tensors"}, formats.packed(4, 128)),
    "int8": ("smooth_quant", {}, formats.smooth_quant()),
    "fp8": ("smooth_quant", {"quant_dtype": "fp8"}, formats.smooth_quant("float8_e4m3fn")),
    "int8-compressed": (
        "smooth_quant", {"checkpoint_format": "compressed-tensors"}, formats.eight("int8", "channel")
    ),
    "fp8-compressed": (
        "smooth_quant",
        {"checkpoint_format": "compressed-tensors", "quant_dtype": "fp8"},
        formats.eight("e4m3", "channel"),
    ),
    "fp8-block": ("blocked_fp8", {}, formats.fp8("block")),
}  # fmt: skip
"""Tool, options, and what reads the files."""


def plain_copy(folder: Path, destination: Path, fmt: Format | Eight) -> Path:
    """What numpy reads in a quantized checkpoint, as a plain one."""
    destination.mkdir()
    for file in folder.glob("*.json"):
        shutil.copyfile(file, destination / file.name)
    modules: dict[str, Tensors] = {}
    plain, tensors = {}, load_file(folder / "model.safetensors")
    codes = {name for name, tensor in tensors.items() if tensor.element_size() == 1 or tensor.dtype == torch.int32}
    quantized = {name.rpartition(".")[0] for name in codes}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "bias" or module not in quantized:
            plain[name] = tensor
        else:
            array = tensor.view(torch.uint8).numpy() if tensor.dtype == torch.float8_e4m3fn else tensor.float().numpy()
            modules.setdefault(module, {})[suffix] = tensor.numpy() if tensor.dtype != torch.float8_e4m3fn else array
    assert modules
    for module, tensors in modules.items():
        plain[f"{module}.weight"] = torch.from_numpy(fmt.decode(fmt, tensors)).float().contiguous()  # type: ignore[arg-type]
    save_file(plain, destination / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((destination / "config.json").read_text(encoding="utf-8"))
    del fields["quantization_config"]
    (destination / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return destination


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("source"), mlp_bias=False, **SIZES)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_is_the_one_that_numpy_reads(name: str, source: Path, tmp_path: Path) -> None:
    tool, options, fmt = WRITTEN[name]
    texts = {} if tool == "blocked_fp8" else {"texts": TEXTS}
    TOOLS[tool](source, tmp_path / "written", **options, **texts)
    plain = plain_copy(tmp_path / "written", tmp_path / "written" / "plain", fmt)
    read = test_scaled_weights if isinstance(fmt, Eight) else test_packed_weights
    read.assert_as_read_by_numpy(tmp_path / "written")
    before, after = logits_of(open_cpu(source)), logits_of(open_cpu(plain))
    lost = float((after - before).norm() / before.norm())
    assert 1e-4 < lost < (1.0 if name == "gptq-2" else 0.2 if isinstance(fmt, Eight) else 0.5)
    fields = json.loads((tmp_path / "written" / "config.json").read_text(encoding="utf-8"))
    settings = fields["quantization_config"]
    said = {key: value for key, value in fmt.config.items() if key != "config_groups"}
    assert {key: settings.get(key) for key in said} == said
    assert settings.get("modules_to_not_convert", ["lm_head"]) == ["lm_head"]


@pytest.mark.parametrize(
    ("fmt", "encode"),
    [
        (formats.awq(32), lambda weight: encode_gemm(weight)),
        (formats.gptq(4, 32), lambda weight: encode_gptq(weight, 4)),
        (formats.gptq(8, 32), lambda weight: encode_gptq(weight, 8)),
        (formats.gptq(2, 32), lambda weight: encode_gptq(weight, 2)),
        (formats.packed(4, 32, symmetric=False), lambda weight: encode_packed(weight, 4, symmetric=False)),
        (formats.packed(8, 32, symmetric=False), lambda weight: encode_packed(weight, 8, symmetric=False)),
    ],
)
def test_words_have_the_bits_of_numpy_s(fmt: Format, encode: Any) -> None:
    random = np.random.default_rng()
    top, (n, k) = 2**fmt.bits, (48, 96)
    codes, zeros = random.integers(0, top, (n, k)), random.integers(1, top, (3, n))
    scales = random.random((3, n)).astype(np.float16)
    found = encode(
        Decoded(*(torch.from_numpy(each) for each in (codes.astype(np.uint8), scales, zeros.astype(np.uint8))))
    )
    expected = fmt.encode(fmt, codes, scales, zeros, np.arange(k) // 32)
    assert found.keys() == expected.keys()
    for suffix, tensor in found.items():
        assert np.array_equal(tensor.numpy(), expected[suffix]), suffix


OF_FAMILIES: dict[str, tuple[str, dict[str, Any], Format | Eight]] = {
    "mamba": ("auto_gptq", {"w_group_size": -1}, formats.gptq(4, -1, symmetric=False)),
    "qwen3_5": (
        "auto_gptq",
        {"w_group_size": -1, "w_bits": 8, "checkpoint_format": "compressed-tensors"},
        formats.packed(8, -1, symmetric=False),
    ),
    "falcon_h1": ("smooth_quant", {}, formats.smooth_quant()),
    "lfm2": ("blocked_fp8", {}, formats.fp8("block")),
    # All experts of a layer in one tensor.
    "llama4": ("auto_gptq", {"w_group_size": -1}, formats.gptq(4, -1, symmetric=False)),
    "gpt_oss": ("smooth_quant", {}, formats.smooth_quant()),
    "granite_hybrid": ("blocked_fp8", {}, formats.fp8("block")),
    # Layers that read others' keys and values, and have embeddings of their own.
    "gemma3n": ("auto_gptq", {"w_group_size": -1, "calib_samples": 0}, formats.gptq(4, -1, symmetric=False)),
    "gemma4": ("blocked_fp8", {}, formats.fp8("block")),
    # Blocks that several layers share.
    "zamba2": ("blocked_fp8", {}, formats.fp8("block")),
    # An index of tokens.
    "deepseek_v32": ("blocked_fp8", {}, formats.fp8("block")),
}
"""What is written of families with other layers than Llama's."""


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_family_s_checkpoint_is_the_one_that_numpy_reads(family: str, tmp_path: Path) -> None:
    source, written = build_checkpoint(family, tmp_path / "source"), tmp_path / "written"
    tool, options, fmt = OF_FAMILIES[family]
    texts = {} if tool == "blocked_fp8" or "calib_samples" in options else {"texts": TEXTS}
    TOOLS[tool](source, written, **options, **texts)
    plain_copy(written, written / "plain", fmt)
    read = test_scaled_weights if isinstance(fmt, Eight) else test_packed_weights
    read.assert_as_read_by_numpy(written)
    before, after = logits_of(open_cpu(source)), logits_of(open_cpu(written))
    assert 1e-4 < (after - before).norm() / before.norm() < 0.5
    settings = json.loads((written / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    plain = settings.get("modules_to_not_convert", settings.get("ignore"))
    matrices = {
        name
        for name, each in load_file(written / "model.safetensors").items()
        if each.ndim == 2 and each.element_size() > 1
    }
    kept = {
        name.removesuffix(".weight") for name in matrices if name.endswith(".weight") and "embed_tokens" not in name
    }
    assert plain is None or kept <= set(plain)


def test_experts_are_quantized_and_what_chooses_them_is_not(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
    source = build_checkpoint("qwen3_moe", tmp_path / "source", **sizes, moe_intermediate_size=64, mlp_only_layers=[])
    for tool, options in (
        ("auto_awq", {"w_group_size": 32}),
        ("auto_gptq", {"w_group_size": 32}),
        ("smooth_quant", {}),
    ):
        TOOLS[tool](source, tmp_path / tool, texts=TEXTS, **options)
        names = {name for name in load_file(tmp_path / tool / "model.safetensors") if ".mlp." in name}
        suffix = "scale" if tool == "smooth_quant" else "qweight"
        assert f"model.layers.0.mlp.experts.1.gate_proj.{suffix}" in names
        assert "model.layers.0.mlp.gate.weight" in names
        written, before = logits_of(open_cpu(tmp_path / tool)), logits_of(open_cpu(source))
        assert 1e-4 < (written - before).norm() / before.norm() < 0.5
    settings = json.loads((tmp_path / "auto_gptq" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (inside,) = settings["modules_in_block_to_quantize"]
    assert "mlp.experts.0.down_proj" in inside
    assert "mlp.gate" not in inside
