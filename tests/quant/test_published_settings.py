"""quantization_config as published checkpoints spell it: each loads as numpy reads its files, or is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.models.registry import read_config
from tests.checkpoints import build_checkpoint
from tests.quant import test_packed_weights, test_scaled_weights
from tests.quant.formats import Eight, Format, awq, change, eight, fp8, gptq, is_projection, packed, write, write_config
from tests.quant.test_packed_weights import open_cpu

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}

ATTENTION = "model.layers.0.self_attn"


def group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "group_0": {
            "input_activations": inputs,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": weights,
            **more,
        }
    }


def numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """As llm-compressor writes them, with all that it has."""
    return {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": bits,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": strategy, "symmetric": True,
        "type": kind, "zp_dtype": None, **more,
    }  # fmt: skip


QUARK = {
    "ch_axis": None, "dtype": "fp8_e4m3", "group_size": None, "is_dynamic": False, "qscheme": "per_tensor",
    "observer_cls": "PerTensorMinMaxObserver", "round_method": "half_even", "scale_type": "float", "symmetric": True,
}  # fmt: skip

CACHE = numbers(8, "float", "tensor")

SETTINGS: dict[str, tuple[Format | Eight, dict[str, Any]]] = {
    "Qwen2.5-7B-Instruct-AWQ": (
        awq(128),
        {
            "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
            "zero_point": True,
        },
    ),
    "Qwen2.5-VL-7B-Instruct-AWQ": (
        awq(128),
        {
            "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
            "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": ["visual"], "quant_method": "awq",
            "version": "gemm", "zero_point": True,
        },
    ),
    "GPTQModel's AWQ": (
        awq(128, "gemv"),
        {
            "bits": 4, "group_size": 128, "desc_act": False, "format": "gemv", "lm_head": False, "quant_method": "awq",
            "pack_dtype": "int32", "zero_point": True, "meta": {"quantizer": ["gptqmodel:5.0.0"]},
        },
    ),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (
        gptq(4, 128, bias=True),
        {
            "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
            "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
            "group_size": 128, "max_input_length": None, "model_seqlen": None,
            "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
            "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
            "use_exllama": True,
        },
    ),
    "TheBloke's GPTQ": (
        gptq(4, 64, shuffled=True),
        {
            "bits": 4, "group_size": 64, "damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": True,
            "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
            "is_marlin_format": False, "quant_method": "gptq",
        },
    ),
    "GPTQModel's GPTQ": (
        gptq(4, 64, gptqmodel=True),
        {
            "bits": 4, "group_size": 64, "desc_act": False, "hyb_act": False, "sym": True, "lm_head": False,
            "quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "backend": "auto",
            "dynamic": {"-:.*mlp\\.gate\\..*": {}, "-:.*lm_head": {}},
            "meta": {
                "quantizer": ["gptqmodel:4.0.0"], "uri": "https://github.com/modelcloud/gptqmodel",
                "damp_percent": 0.05, "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True,
                "mse": 0.0, "v2": False, "v2_alpha": 0.25, "act_group_aware": True,
            },
        },
    ),
    "Intel's AutoRound": (
        gptq(4, 128),
        {
            "amp": True, "autoround_version": "0.5.1", "backend": "auto", "batch_size": 8, "bits": 4,
            "block_name_to_quantize": "model.layers", "data_type": "int", "enable_quanted_input": True,
            "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}, "group_size": 128, "iters": 1000,
            "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "seqlen": 2048, "sym": True,
        },
    ),
    "Intel's first AutoRound": (
        awq(128),
        {
            "backend": "auto_round:awq", "bits": 4, "data_type": "int", "group_size": 128, "sym": False,
            "quant_method": "intel/auto-round", "to_quant_block_names": None,
        },
    ),
    "RedHatAI's w4a16": (
        packed(4, 128),
        {
            "config_groups": group(numbers(4, "int", "group", group_size=128, actorder="weight"), None),
            "format": "pack-quantized", "global_compression_ratio": 1.8, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
            "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
        },
    ),
    "Kimi-K2-Thinking": (
        packed(4, 32),
        {
            "config_groups": group(numbers(4, "int", "group", group_size=32), None, format="pack-quantized"),
            "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
    ),
    "RedHatAI's w8a8": (
        eight("int8", "channel"),
        {
            "config_groups": group(numbers(8, "int", "channel"), numbers(8, "int", "token", dynamic=True)),
            "format": "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "frozen",
        },
    ),
    "neuralmagic's first int8": (
        eight("int8", "channel"),
        {
            "config_groups": group(
                {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
            ),
            "format": "naive-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors",
            "quantization_status": "frozen",
        },
    ),
    "Meta-Llama-3.1-8B-Instruct-FP8": (
        eight("e4m3", "tensor", static=True),
        {
            "config_groups": group(numbers(8, "float", "tensor"), numbers(8, "float", "tensor")),
            "format": "float-quantized", "ignore": ["re:.*lm_head"], "kv_cache_scheme": CACHE,
            "quant_method": "compressed-tensors", "quantization_status": "frozen",
        },
    ),
    "RedHatAI's FP8-dynamic": (
        eight("e4m3", "channel"),
        {
            "config_groups": group(numbers(8, "float", "channel"), numbers(8, "float", "token", dynamic=True)),
            "format": "float-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "ignore": ["re:.*lm_head", "re:.*router", "re:vision_model.*", "re:multi_modal_projector.*"],
            "quantization_status": "compressed",
        },
    ),
    "AutoFP8": (
        fp8("tensor", static=True),
        {
            "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
    ),
    "Meta-Llama-3.1-405B-Instruct-FP8": (
        eight("e4m3", "channel"),
        {
            "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0.mlp.down_proj", "lm_head"],
            "quant_method": "fbgemm_fp8",
        },
    ),
    "amd's FP8-KV": (
        fp8("tensor", static=True),
        {
            "algo_config": None, "exclude": ["lm_head"], "layer_quant_config": {}, "layer_type_quant_config": {},
            "export": {
                "kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder", "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": {
                "bias": None, "output_tensors": None, "target_device": None, "input_tensors": QUARK, "weight": QUARK,
            },
            "quant_method": "quark", "quant_mode": "eager_mode",
        },
    ),
    "DeepSeek-V3.1": (
        fp8("block"),
        {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    ),
    "Qwen3-8B-FP8": (
        fp8("block"),
        {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"], "ignored_layers": ["lm_head"],
        },
    ),
    "nvidia's FP8": (
        fp8("tensor", static=True),
        {
            "config_groups": group(
                {"dynamic": False, "num_bits": 8, "type": "float"}, {"dynamic": False, "num_bits": 8, "type": "float"}
            ),
            "ignore": ["lm_head"], "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.37.0"}, "quant_algo": "FP8", "quant_method": "modelopt",
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("dense"), mlp_bias=False, **SIZES)


def assert_as_read_by_numpy(folder: Path, fmt: Format | Eight) -> None:
    (test_scaled_weights if isinstance(fmt, Eight) else test_packed_weights).assert_as_read_by_numpy(folder)


@pytest.mark.parametrize("name", SETTINGS)
def test_published_settings_load(name: str, dense: Path, tmp_path: Path) -> None:
    fmt, settings = SETTINGS[name]
    folder = write(dense, tmp_path / "model", fmt)
    write_config(folder, settings)
    assert_as_read_by_numpy(folder, fmt)


def test_scales_of_caches_are_left_out(dense: Path, tmp_path: Path) -> None:
    fmt, settings = SETTINGS["Meta-Llama-3.1-8B-Instruct-FP8"]
    folder = write(dense, tmp_path / "model", fmt)
    write_config(folder, settings)
    names = ("k_scale", "v_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale")
    change(folder, lambda tensors: tensors.update({f"{ATTENTION}.{name}": torch.ones(1) for name in names}))
    assert_as_read_by_numpy(folder, fmt)
    change(folder, lambda tensors: tensors.update({f"{ATTENTION}.q_proj.output_scale": torch.ones(1)}))
    with pytest.raises(InvalidCheckpoint, match="output_scale"):
        open_cpu(folder)


def test_the_scale_of_activations_by_transformers_names(dense: Path, tmp_path: Path) -> None:
    """Ministral 3 and Devstral 2 have it."""
    fmt = fp8("tensor", static=True)
    folder = write(dense, tmp_path / "model", fmt)
    expected = test_packed_weights.logits_of(open_cpu(folder))
    write_config(
        folder,
        {
            "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
    )  # fmt: skip
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}

    def renamed(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            module, _, suffix = name.rpartition(".")
            tensors[f"{module}.{names.get(suffix, suffix)}"] = tensors.pop(name)

    change(folder, renamed)
    assert torch.equal(test_packed_weights.logits_of(open_cpu(folder)), expected)


def test_a_file_of_its_own_has_modelopt_s_settings(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", fp8("tensor", static=True))
    write_config(folder, None)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": inner}))
    assert_as_read_by_numpy(folder, fp8("tensor", static=True))
    file.write_text(json.dumps({"quantization": {**inner, "quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(UnsupportedModel, match=r"hf_quant_config\.json.*quant_algo = 'W4A8_AWQ'"):
        open_cpu(folder)


def test_modules_with_settings_of_their_own(dense: Path, tmp_path: Path) -> None:
    """In GPTQModel's files and in llm-compressor's."""

    def of_mlp(name: str) -> bool:
        return is_projection(name) and ".mlp." in name

    def mixed(folder: Path, first: Format, second: Format) -> Path:
        """The MLP by the first format, attention by the second."""
        write(dense, folder, first, of_mlp)
        write(folder / "plain", folder / "other", second, lambda name: is_projection(name) and not of_mlp(name))
        (folder / "other").rename(folder.with_suffix(".both"))
        whole = folder.with_suffix(".both")
        other = {name: tensor for name, tensor in _tensors(folder).items() if ".mlp." in name}

        def joined(tensors: dict[str, Tensor]) -> None:
            for name in [name for name in tensors if ".mlp." in name]:
                del tensors[name]
            tensors.update(other)

        change(whole, joined)
        return whole

    both = mixed(tmp_path / "gptq", gptq(8, 128), gptq(4, 64))
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    dynamic = {"-:.*lm_head": {}, "+:model\\.layers\\.\\d+\\.mlp": {"bits": 8, "group_size": 128}, ".*mlp": {"bits": 2}}
    write_config(both, {**settings, "dynamic": dynamic})
    assert_as_read_by_numpy(both, gptq(4, 64))
    write_config(both, {**settings, "dynamic": {**dynamic, "+:model": {"bits": 5}}})
    with pytest.raises(UnsupportedModel, match=r"dynamic.*bits = 5"):
        open_cpu(both)
    write_config(both, {**settings, "dynamic": {"+:*": {"bits": 8}}})
    with pytest.raises(InvalidCheckpoint, match="not a regular expression"):
        open_cpu(both)

    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True}
    own = {".*\\.(gate|up)_proj": {"bits": 8, "group_size": 128}, "lm_head": {"bits": 16}}
    own["model.layers.0.mlp.down_proj"] = {"bits": 8, "group_size": 128}
    write_config(both, {**settings, "extra_config": own})
    assert_as_read_by_numpy(both, gptq(4, 64))
    write_config(both, {**settings, "extra_config": {".*": {"bits": 5}}})
    with pytest.raises(UnsupportedModel, match=r"extra_config\..*bits = 5"):
        open_cpu(both)

    both = mixed(tmp_path / "packed", packed(8, -1), packed(4, 32))
    one = {"input_activations": None, "output_activations": None, "format": "pack-quantized"}
    groups = {
        "group_0": {**one, "targets": ["re:.*mlp\\.(gate|up|down)_proj$"], "weights": numbers(8, "int", "channel")},
        "group_1": {**one, "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}},
    }
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    write_config(both, settings)
    assert_as_read_by_numpy(both, packed(4, 32))


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    change(folder, found.update)
    return found


REFUSED: dict[str, tuple[Format | Eight, dict[str, Any], str]] = {
    "Marlin's files": (gptq(4, 64), {"is_marlin_format": True}, "is_marlin_format"),
    "words of 16 bits": (gptq(4, 64), {"pack_dtype": "int16"}, "pack_dtype"),
    "GPTQModel's layout of AWQ": (awq(128), {"version": None, "format": "gemv_fast"}, "format = 'gemv_fast'"),
    "AutoRound's own layout": (
        gptq(4, 64),
        {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"},
        "backend = 'auto_round:exllamav2'.*auto_gptq",
    ),
    "AutoRound's activations of 4 bits": (gptq(4, 64), {"quant_method": "auto-round", "act_bits": 4}, "act_bits = 4"),
    "AutoRound's floats": (gptq(4, 64), {"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type = 'mx_fp'"),
    "AMD's int4": (
        fp8("tensor"),
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}, "input_tensors": QUARK}},
        "dtype = 'int4'",
    ),
    "AMD's layers by their class": (
        fp8("tensor"),
        {"quant_method": "quark", "layer_type_quant_config": {"Conv1d": {"weight": QUARK}}},
        "layer_type_quant_config",
    ),
    "HQQ": (
        awq(128),
        {"quant_config": {"weight_quant_params": {"nbits": 4}}, "quant_method": "hqq"},
        "'hqq'.*bfloat16",
    ),
    "ModelOpt's AWQ without the method's name": (
        fp8("tensor"),
        {"quant_method": None, "config_groups": {"group_0": {}}, "quant_algo": "W4A16_AWQ"},
        "quant_algo = 'W4A16_AWQ'",
    ),
    "fp8 of another type": (
        eight("e4m3", "channel"),
        {"config_groups": group(numbers(8, "int", "channel"), None)},
        "weights: type = 'int'",
    ),
    "a list of formats": (packed(4, 32), {"format": ["pack-quantized"]}, "format = "),
    "sparse weights": (packed(4, 32), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
}


def test_what_is_refused_is_named(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(dense, folder)
    for fmt, changes, says in REFUSED.values():
        write_config(folder, {**fmt.config, **changes})
        with pytest.raises(UnsupportedModel, match=says):
            read_config(folder)


def test_mlx_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    """Its files say `quantization`, newer ones also quantization_config, without a method but with a mode."""
    old: dict[str, Any] = {"group_size": 64, "bits": 4}
    new = {**old, "mode": "affine"}
    folder = write(dense, tmp_path / "model", gptq(4, 64))
    fields = {**json.loads((folder / "config.json").read_text()), "quantization_config": None}
    for own in ({"quantization": old}, {"quantization": new, "quantization_config": new}, {"quantization_config": new}):
        (folder / "config.json").write_text(json.dumps({**fields, **own}))
        with pytest.raises(UnsupportedModel, match=r"quantization.* = .*MLX.*bfloat16"):
            read_config(folder)
