"""Spellings of published files that transformers reads, but does not write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.models.build import open_model
from asyncllm.models.mimo_v2_flash import MiMoV2FlashConfig
from asyncllm.models.step3p5 import Step3p5Config
from asyncllm.models.zamba import ZambaConfig
from asyncllm.models.zamba2 import Zamba2Config
from tests.checkpoints import build_checkpoint, native_class, tiny_fields
from tests.models.test_config import ABSENT, read, tiny

NOWHERE = {"rope_theta": ABSENT, "rope_scaling": ABSENT}


@pytest.mark.parametrize(
    "rope", [ABSENT, None, {"rope_type": None}, {"rope_theta": None, "rope_type": "default"}, {"rope_theta": None}]
)
def test_olmo_hybrid_without_positions(tmp_path: Path, rope: Any) -> None:
    """The 7B's files had null, and have had an object of nulls since."""
    assert read(tmp_path, {**NOWHERE, "rope_parameters": rope}, tiny("OlmoHybridForCausalLM")).rope is None


def test_olmo_hybrid_with_positions(tmp_path: Path) -> None:
    config = read(tmp_path, {**NOWHERE, "rope_parameters": {"rope_theta": 5e5}}, tiny("OlmoHybridForCausalLM"))
    assert config.rope is not None
    assert config.rope.theta == 5e5
    scaling = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="rope_type = 'linear'"):
        read(tmp_path, {**NOWHERE, "rope_parameters": scaling}, tiny("OlmoHybridForCausalLM"))


def test_layers_of_smollm3_with_a_window_are_those_listed(tmp_path: Path) -> None:
    listed = ["sliding_attention", "full_attention"] * 2
    fields = {"layer_types": listed, "sliding_window": 8, "use_sliding_window": False, "num_hidden_layers": 4}
    assert read(tmp_path, fields, tiny("SmolLM3ForCausalLM")).windows == (8, None, 8, None)
    with pytest.raises(InvalidCheckpoint, match="sliding_window is not set"):
        read(tmp_path, {**fields, "sliding_window": None}, tiny("SmolLM3ForCausalLM"))


def test_layers_of_gpt_neo_with_a_window_are_those_listed(tmp_path: Path) -> None:
    fields = {"attention_layers": ["local", "global"]}
    assert read(tmp_path, fields, tiny("GPTNeoForCausalLM")).windows == (8, None)
    with pytest.raises(InvalidCheckpoint, match=r"attention_layers = .*each of 2 layers"):
        read(tmp_path, {"attention_layers": ["local"]}, tiny("GPTNeoForCausalLM"))


def test_layers_of_kimi_linear(tmp_path: Path) -> None:
    """Its files count from 1, transformers' list of kinds goes before them, and what is in neither has every fourth."""
    base = tiny("KimiLinearForCausalLM")
    own = base["linear_attn_config"]

    def attended(changes: dict[str, Any]) -> Any:
        return read(tmp_path, changes, base).attention_layers  # type: ignore[attr-defined]

    assert attended({}) == {1, 4}
    assert attended({"layer_types": ["full_attention", *["linear_attention"] * 4]}) == {0}
    assert attended({"linear_attn_config": ABSENT}) == {4}
    for lists in ({"kda_layers": [1, 3]}, {"kda_layers": [1, 3, 4, 5]}, {"kda_layers": [1, 3, "4"]}, {"kda_layers": 3}):
        with pytest.raises(InvalidCheckpoint, match="do not name each of 5 layers once"):
            attended({"linear_attn_config": {**own, **lists}})
    with pytest.raises(UnsupportedModel, match="mla_use_nope = False"):
        attended({"mla_use_nope": False})


def test_windows_of_mimo(tmp_path: Path) -> None:
    """The published `sliding_window_size` leaves out the query's own position, `sliding_window` of transformers does
    not; sizes of the two kinds of layers that differ are refused."""
    base = {**tiny("MiMoV2FlashForCausalLM"), "layer_types": ABSENT, "num_hidden_layers": 7}
    assert read(tmp_path, {}, base).windows == (None, 9, 9, 9, 9, None, 9)
    published = {"sliding_window": 8, "sliding_window_size": 8, "hybrid_layer_pattern": [1, 0, 0, 0, 0, 0, 1]}
    assert read(tmp_path, published, base).windows == (9, *[None] * 5, 9)
    assert read(tmp_path, {"moe_layer_freq": [0, 1, 0, 1, 0, 0, 1]}, base).experts.layers == {1, 3, 6}
    own = {"swa_num_key_value_heads": 8, "attention_value_scale": None}
    config = read(tmp_path, own, base)
    assert isinstance(config, MiMoV2FlashConfig)
    assert (config.num_kv_heads, config.window_kv_heads, config.value_scale) == (2, 8, 1.0)
    for changes in ({"swa_head_dim": 16}, {"add_full_attention_sink_bias": True}, {"swa_v_head_dim": 24}):
        with pytest.raises(UnsupportedModel, match=next(iter(changes))):
            read(tmp_path, changes, base)
    for changes in (
        {"hybrid_layer_pattern": [0, 1]},
        {"hybrid_layer_pattern": [0, 2] * 3},
        {"moe_layer_freq": 1},
        {"v_head_dim": 32},
        {"swa_num_key_value_heads": 3},
    ):
        with pytest.raises(InvalidCheckpoint, match="layer_types|" + next(iter(changes))):
            read(tmp_path, changes, base)


def test_rotations_of_mimo(tmp_path: Path) -> None:
    """The published rope_parameters are those of layers without a window; an entry of its own has the others' base."""
    flat = {"rope_type": "default", "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.334}
    base = {**tiny("MiMoV2ForCausalLM"), "rope_parameters": flat, "swa_rope_theta": 20000}
    ropes = read(tmp_path, {"rope_theta": 3e6}, base).layer_ropes
    assert [(each.theta, each.dim) for each in ropes] == [(theta, 8) for theta in (1e7, 2e4, 2e4, 1e7)]
    assert read(tmp_path, {"rope_parameters": ABSENT, "rope_theta": 3e6}, base).layer_ropes[0].theta == 3e6
    assert read(tmp_path, {"attention_projection_layout": "fused_qkv", "hybrid_block_size": None}, base)
    for changes in (
        {"rope_parameters": {**flat, "rope_type": "yarn", "factor": 2.0}},
        {"attention_projection_layout": "fused_kv"},
        {"hybrid_block_size": 6},
    ):
        with pytest.raises(UnsupportedModel, match=next(iter(changes))):
            read(tmp_path, changes, base)


def test_shared_blocks_of_zamba2(tmp_path: Path) -> None:
    """Heads are as wide as twice the stream allows, whatever the file repeats of them; norms, kinds of layers and sizes
    that would change the computation are refused."""
    base = tiny("Zamba2ForCausalLM")
    config = read(tmp_path, {"attention_head_dim": 16, "attention_hidden_size": 64, "mamba_headdim": 16}, base)
    assert isinstance(config, Zamba2Config)
    assert (config.head_dim, config.attention_layers, config.tied, config.min_step) == (16, {1, 2, 3}, True, 0.4)
    renamed = {"layers_block_type": ABSENT, "layer_types": ["hybrid", *["mamba"] * 3]}
    assert read(tmp_path, renamed, base).attention_layers == {0}  # type: ignore[attr-defined]
    plain = read(tmp_path, {"use_mem_rope": False, "intermediate_size": ABSENT}, base)
    assert (plain.rope, plain.intermediate_size) == (None, 128)
    for changes in (
        {"use_long_context": True},
        {"attention_head_dim": 8},
        {"attention_hidden_size": 32},
        {"layers_block_type": ["attention"] * 4},
        {"hidden_act": "tanh"},
    ):
        with pytest.raises(UnsupportedModel, match=next(iter(changes))):
            read(tmp_path, changes, base)
    for changes in (
        {"layers_block_type": ABSENT},
        {"layers_block_type": ["hybrid"]},
        {"num_key_value_heads": 2},
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"n_mamba_heads": 5},
    ):
        with pytest.raises(InvalidCheckpoint, match=next(iter(changes)).replace("n_mamba_heads", "mamba_d_head")):
            read(tmp_path, changes, base)


def test_kinds_and_heads_of_zamba(tmp_path: Path) -> None:
    """Where no list has them, kinds follow from a period and an offset, behind the first three layers."""
    base = {**tiny("ZambaForCausalLM"), "layers_block_type": ABSENT, "num_hidden_layers": 17}
    config = read(tmp_path, {"attention_head_dim": ABSENT}, base)
    assert isinstance(config, ZambaConfig)
    assert (config.attention_layers, config.head_dim, config.mamba_size) == ({2, 7, 13}, 16, 64)
    assert config.score_scale == 8**-0.5
    other = read(tmp_path, {"attn_layer_period": 4, "attn_layer_offset": 0}, base)
    assert other.attention_layers == {2, 3, 7, 11, 15}  # type: ignore[attr-defined]
    for changes in ({"hidden_mamba_act": "gelu"}, {"attention_hidden_size": 32}):
        with pytest.raises(UnsupportedModel, match=next(iter(changes))):
            read(tmp_path, changes, base)
    for changes in ({"n_mamba_heads": 5}, {"num_attention_heads": 3}, {"layers_block_type": ["hybrid"]}):
        with pytest.raises(InvalidCheckpoint, match=next(iter(changes)).replace("attention", "(key_value|attention)")):
            read(tmp_path, changes, base)


def test_stacked_experts_of_a_layer_that_has_none(tmp_path: Path) -> None:
    file = build_checkpoint("mistral4", tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "first_k_dense_replace": 2}))
    with pytest.raises(InvalidCheckpoint, match=r"has no place in the model, .* without layers\.1\.mlp\.\w+\.weight"):
        open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


IN_MEMORY = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie_moe", "exaone_moe", "flex_olmo", "flint"),
    *("gpt_neox", "lfm3"),
    *("glm4_moe", "granite_hybrid", "granite_moe", "hunyuan_moe", "hy_v3", "jamba", "kimi_linear", "laguna"),
    *("kolibri1", "axk1", "bailing_hybrid", "mimo_v2_flash", "minimax"),
    *("lfm2_moe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open"),
)


@pytest.mark.parametrize("family", IN_MEMORY)
def test_tensors_as_transformers_has_them_in_memory(tmp_path: Path, family: str) -> None:
    """Programs that train with transformers 5 write them, with all experts of a layer in one tensor."""
    written = build_checkpoint(family, tmp_path / "written")
    model = native_class(tiny_fields(family)["model_type"]).from_pretrained(written, dtype=torch.float32)
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    names = [set(load_file(tmp_path / each / "model.safetensors")) for each in ("written", "memory")]
    assert names[0] != names[1]
    parameters = [
        dict(open_model(tmp_path / each, dtype=torch.float32, device=torch.device("cpu")).named_parameters())
        for each in ("written", "memory")
    ]
    assert parameters[0].keys() == parameters[1].keys()
    assert all(torch.equal(tensor, parameters[1][name]) for name, tensor in parameters[0].items())


@pytest.mark.parametrize(("family", "written"), [("exaone", "LlamaForCausalLM"), ("sarvam_moe", "Glm4MoeForCausalLM")])
def test_classes_of_other_families_in_files_of_transformers(tmp_path: Path, family: str, written: str) -> None:
    """Version 5.24 has no class of its own for these, and writes the tensors under the published names."""
    file = build_checkpoint(family, tmp_path) / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    own = fields["architectures"]
    words = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_layers": "num_hidden_layers",
    }
    fields = {words.get(key, key): value for key, value in fields.items() if key != "auto_map"}
    file.write_text(json.dumps({**fields, "architectures": [written]}))
    model = open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert [model.config.architecture] == own


@pytest.mark.parametrize("bound", [0, 5.0, "-5", True])
def test_bounds_of_ling_that_are_none(tmp_path: Path, bound: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"kda_lower_bound = .*, where a number below 0 belongs"):
        read(tmp_path, {"kda_lower_bound": bound}, tiny("BailingHybridForCausalLM"))


def test_entries_of_step_by_layer(tmp_path: Path) -> None:
    """Published files give rotations by layer and say further layers; transformers writes them by kind."""
    base = tiny("Step3p5ForCausalLM")
    config = read(tmp_path, {}, base)
    assert isinstance(config, Step3p5Config)
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    }
    written = {
        **{"rope_parameters": kinds, "rope_theta": ABSENT, "partial_rotary_factors": ABSENT, "moe_layers_enum": ABSENT},
        **{"mlp_layer_types": ["dense", "sparse"] * 2, "attention_other_setting": ABSENT},
        **{"num_sliding_attention_heads": 6},
        "per_layer_config": {"1": {"num_attention_heads": 6}, "2": {"num_attention_heads": 6}},
    }
    assert read(tmp_path, written, base) == config
    assert read(tmp_path, {"moe_layers_enum": [1, 3], "swiglu_limits": [None, 0.3, None, 0.4]}, base) == config
    assert read(tmp_path, {"swiglu_limits": None, "rope_theta": 700.0}, base).limits == (None,) * 4  # type: ignore[attr-defined]
    scaling = {"rope_type": "linear", "factor": 2.0}
    ropes = read(tmp_path, {"rope_scaling": scaling}, base).layer_ropes
    assert [rope.kind for rope in ropes if rope is not None] == ["linear", "default", "default", "linear"]
    for changes in (
        {"rope_theta": [5000.0, 500.0, 600.0, 5000.0]},
        {"zero_centered": False},
        {"use_rope_layers": [1]},
        {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 1}},
        {"per_layer_config": {"1": {"num_attention_heads": 4}}},
    ):
        with pytest.raises(UnsupportedModel):
            read(tmp_path, changes, base)
    for changes in ({"rope_theta": [1.0]}, {"moe_layers_enum": "1,x"}, {"swiglu_limits": [7.0]}):
        with pytest.raises(InvalidCheckpoint, match=next(iter(changes))):
            read(tmp_path, changes, base)


def test_layers_of_ling_2_5(tmp_path: Path) -> None:
    """The last of each group has latent attention, and so have those behind the last whole group; heads are rotated
    alike in both kinds of layers."""
    base = {**tiny("BailingMoeV2_5ForCausalLM"), "num_hidden_layers": 7, "layer_group_size": 3}
    assert read(tmp_path, {}, base).attention_layers == {2, 5, 6}  # type: ignore[attr-defined]
    assert (
        read(tmp_path, {"linear_rope": False, "partial_rotary_factor": 0.25}, base).rope
        == read(tmp_path, {}, base).rope
    )
    for changes in ({"partial_rotary_factor": 0.25}, {"use_qkv_bias": True}, {"score_function": "softmax"}):
        with pytest.raises(UnsupportedModel, match="qk_rope_head_dim = 8|" + next(iter(changes))):
            read(tmp_path, changes, base)
    with pytest.raises(InvalidCheckpoint, match="group_norm_size = 5, which does not divide 6 heads of 16"):
        read(tmp_path, {"group_norm_size": 5}, base)


def test_rotations_of_north_micro(tmp_path: Path) -> None:
    """Its files also have entries for all layers, which nothing reads; kinds of layers without settings see no
    positions."""
    base = tiny("CohereCompassForCausalLM")
    sliding = base["rope_parameters"]["sliding_attention"]
    config = read(
        tmp_path,
        {"rope_parameters": {"sliding_attention": sliding, "full_attention": None, "rope_theta": 1e4}},
        base,
    )
    assert [None if rope is None else rope.theta for rope in config.layer_ropes] == [500.0, None] * 2
    assert config.windows == (8, None) * 2
    assert read(tmp_path, {"layer_types": None}, base).windows == (None,) * 4
    for rope in (ABSENT, {"rope_type": "default", "rope_theta": 1e4}):
        with pytest.raises(UnsupportedModel, match="rope_parameters"):
            read(tmp_path, {"rope_parameters": rope}, base)


def test_layers_of_ettin_decoders(tmp_path: Path) -> None:
    """Published files name bases of rotation by kind of layer, and half of an encoder's window is theirs."""
    names = {"rope_parameters": ABSENT, "local_attention": ABSENT, "global_rope_theta": 16e4, "local_rope_theta": 8e4}
    config = read(tmp_path, names, tiny("ModernBertDecoderForCausalLM"))
    assert config.windows == (None, 64, 64, None)
    assert [rope.theta for rope in config.layer_ropes if rope is not None] == [16e4, 8e4, 8e4, 16e4]
    config = read(tmp_path, {**names, "global_attn_every_n_layers": 2}, tiny("ModernBertDecoderForCausalLM"))
    assert config.windows == (None, 64, None, 64)
    with pytest.raises(UnsupportedModel, match="classifier_activation = 'silu'"):
        read(tmp_path, {"classifier_activation": "silu"}, tiny("ModernBertDecoderForCausalLM"))
