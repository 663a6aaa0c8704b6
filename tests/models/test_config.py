"""config.json: what is read from it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import InvalidCheckpoint, InvalidParameter, UnsupportedModel
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.registry import families, read_config

LLAMA = {**families()["LlamaForCausalLM"].tiny, "architectures": ["LlamaForCausalLM"]}
ABSENT = object()


def read(tmp_path: Path, changes: dict[str, Any], base: dict[str, Any] = LLAMA, **settings: Any) -> ModelConfig:
    fields = {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return read_config(tmp_path, **settings)


def tiny(architecture: str) -> dict[str, Any]:
    return {**families()[architecture].tiny, "architectures": [architecture]}


def test_llama_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, {"num_key_value_heads": ABSENT, "max_position_embeddings": ABSENT, "attention_bias": None})
    assert config.num_kv_heads == config.num_heads == 4
    assert config.head_dim == 16
    assert config.max_position == 2048
    assert config.dtype == "float32"
    assert config.rope.theta == 10000.0
    assert not config.tied
    assert config.dynamic_rope_from is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    ],
    ids=["legacy", "legacy-typed", "v5", "mixed"],
)
def test_theta_in_every_schema(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert read(tmp_path, rope).rope.theta == 5e5


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_in_both_schemas(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("scaling", "max_position"),
    [
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            128,
        ),
    ],
    ids=lambda value: value.get("type", "llama3") if isinstance(value, dict) else str(value),
)
def test_positions_after_scaling(tmp_path: Path, scaling: dict[str, Any], max_position: int) -> None:
    config = read(tmp_path, {"rope_scaling": scaling})
    assert config.max_position == max_position
    assert (config.dynamic_rope_from is not None) == (scaling.get("type") == "dynamic")


@pytest.mark.parametrize(("session_len", "first"), [(None, 3.0), (33, 3.0), (32, 1.0), (8, 1.0)])
@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_picks_its_divisors_by_session_len(
    tmp_path: Path, session_len: int | None, first: float, name: str
) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert read(tmp_path, changes, session_len=session_len).rope.divisors == (first,) * 8


def test_engine_asks_for_dynamic_scaling(tmp_path: Path) -> None:
    config = read(tmp_path, {}, rope_scaling_factor=2.0)
    assert config.dynamic_rope_from is not None
    assert (config.rope.factor, config.rope.original_max_position, config.max_position) == (2.0, 128, 256)


def test_engine_cannot_add_to_another_scaling(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope_scaling_factor = 2\.0 .* yarn"):
        read(tmp_path, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, rope_scaling_factor=2.0)


def test_overrides_replace_entries(tmp_path: Path) -> None:
    assert read(tmp_path, {}, hf_overrides={"rope_theta": 7e4}).rope.theta == 7e4


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD_WORDS = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
NEW_WORDS = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "dtype": "float16"}


@pytest.mark.parametrize("words", [OLD_WORDS, NEW_WORDS], ids=["old", "new"])
def test_overrides_count_in_either_schema(tmp_path: Path, words: dict[str, Any]) -> None:
    rope = read(tmp_path, {"rope_theta": 7e4, "rope_scaling": OLD_WORDS["rope_scaling"]}).rope
    assert read(tmp_path, words, hf_overrides={"rope_theta": 7e4}).rope == rope
    rope = read(tmp_path, {"rope_theta": 5e5, "rope_scaling": YARN}).rope
    assert read(tmp_path, words, hf_overrides={"rope_scaling": YARN}).rope == rope
    assert read(tmp_path, words, hf_overrides={"rope_parameters": {**YARN, "rope_theta": 5e5}}).rope == rope
    for key in ("dtype", "torch_dtype"):
        assert read(tmp_path, words, hf_overrides={key: "bfloat16"}).dtype == "bfloat16"


KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
OLD_KINDS = {
    "rope_parameters": None,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_local_base_freq": 500.0,
}


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 7e4},
        {"rope_local_base_freq": 7e4},
        {"rope_scaling": {**YARN, "rope_type": "yarn"}},
        {"rope_scaling": None},
    ],
)
def test_overrides_count_for_kinds_of_layers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """As in the file of the old schema, whose words they are."""
    gemma = tiny("Gemma3ForCausalLM")
    old = read(tmp_path, {**OLD_KINDS, **overrides}, gemma)
    new = read(tmp_path, {"rope_parameters": KINDS}, gemma, hf_overrides=overrides)
    assert (new.rope, new.layer_ropes) == (old.rope, old.layer_ropes)
    assert new.layer_ropes != read(tmp_path, {"rope_parameters": KINDS}, gemma).layer_ropes
    parts = {**gemma, "rope_parameters": KINDS}
    inner = {key: value for key, value in parts.items() if key != "architectures"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    whole |= {"vision_config": {}, "mm_tokens_per_image": 49}
    for each in (overrides, {"text_config": overrides}):
        (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
        assert read_config(tmp_path, hf_overrides=each).layer_ropes == old.layer_ropes


def test_kinds_of_layers_that_overrides_leave_out_stay(tmp_path: Path) -> None:
    gemma, full = tiny("Gemma3ForCausalLM"), {"rope_type": "default", "rope_theta": 7e4}
    expected = read(tmp_path, {"rope_parameters": {**KINDS, "full_attention": full}}, gemma).layer_ropes
    for given in (full, {"full_attention": full}):
        overrides = {"rope_parameters": given}
        assert read(tmp_path, {"rope_parameters": KINDS}, gemma, hf_overrides=overrides).layer_ropes == expected
    with pytest.raises(InvalidParameter, match=r"rope_theta is for layers of full_attention.*Give rope_parameters"):
        read(tmp_path, {"rope_parameters": {"other": full}}, gemma, hf_overrides={"rope_theta": 7e4})


def test_an_override_of_a_part_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"config\.json has no text_config"):
        read(tmp_path, {}, hf_overrides={"text_config": {"rope_theta": 7e4}})


def test_an_override_turns_scaling_off(tmp_path: Path) -> None:
    plain = read(tmp_path, {"rope_theta": 5e5}).rope
    for words in (OLD_WORDS, NEW_WORDS):
        assert read(tmp_path, words, hf_overrides={"rope_scaling": None}).rope == plain


def test_rope_scaling_beside_rope_parameters_counts(tmp_path: Path) -> None:
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN}
    assert read(tmp_path, both).rope == read(tmp_path, {"rope_theta": 5e5, "rope_scaling": YARN}).rope
    both["rope_scaling"] = {}
    assert read(tmp_path, both).rope == read(tmp_path, {"rope_theta": 5e5}).rope


def test_qwen_window_is_off_unless_asked_for(tmp_path: Path) -> None:
    base = tiny("Qwen2ForCausalLM")
    assert read(tmp_path, {}, base).windows == (None, 8, 8)
    assert read(tmp_path, {"use_sliding_window": False}, base).windows == (None, None, None)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, {"layer_types": kinds}, base).windows == (8, None, 8)


def test_window_of_mistral_may_be_null(tmp_path: Path) -> None:
    assert read(tmp_path, {"sliding_window": None}, tiny("MistralForCausalLM")).windows == (None, None)
    assert read(tmp_path, {"sliding_window": ABSENT}, tiny("MistralForCausalLM")).windows == (4096, 4096)


def test_sparse_layers_of_qwen3_moe(tmp_path: Path) -> None:
    base = tiny("Qwen3MoeForCausalLM")
    assert read(tmp_path, {}, base).experts.layers == {0, 2, 3}
    assert read(tmp_path, {"decoder_sparse_step": 2, "mlp_only_layers": []}, base).experts.layers == {1, 3}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
        ("half", "float16"),
        ("float64", "float32"),
        ("double", "float32"),
        ("torch.float64", "float32"),
        ("float", "float32"),
        ("auto", "float32"),
    ],
)
def test_names_of_types(tmp_path: Path, stated: str, expected: str) -> None:
    """Without weights to look at, auto is float32."""
    assert read(tmp_path, {"torch_dtype": stated}).dtype == expected


def test_factors_of_yarn_that_change_nothing(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    more = {**scaling, "attn_factor": 1.0, "extrapolation_factor": 1}
    assert read(tmp_path, {"rope_scaling": more}) == read(tmp_path, {"rope_scaling": scaling})


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Gemma2ForCausalLM"])
def test_gemma_may_say_gelu_for_its_approximation(tmp_path: Path, architecture: str) -> None:
    changes = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    assert read(tmp_path, changes, tiny(architecture)) == read(tmp_path, {}, tiny(architecture))


def test_rotary_entry_of_internlm(tmp_path: Path) -> None:
    base = {**LLAMA, "architectures": ["InternLMForCausalLM"]}
    plain = read(tmp_path, {"rotary": {"base": 5000, "type": "origin"}}, base)
    assert (plain.rope.kind, plain.rope.theta, plain.max_position) == ("default", 5000.0, 128)
    grown = read(tmp_path, {"rotary": {"base": 5000, "type": "dynamic", "scaling_factor": 2.0}}, base)
    assert (grown.rope.kind, grown.rope.theta, grown.rope.factor, grown.max_position) == ("dynamic", 5000.0, 2.0, 256)


@pytest.mark.parametrize(
    ("architecture", "vocab_size", "normalized"),
    [
        ("BaichuanForCausalLM", 125696, True),
        ("BaichuanForCausalLM", 125698, True),
        ("BaichuanForCausalLM", 64000, False),
        ("BaiChuanForCausalLM", 64000, False),
        ("BaiChuanForCausalLM", 70000, False),
    ],
)
def test_which_baichuan_normalizes_its_head(
    tmp_path: Path, architecture: str, vocab_size: int, normalized: bool
) -> None:
    assert read(tmp_path, {"vocab_size": vocab_size}, tiny(architecture)).normalized_head == normalized


@pytest.mark.parametrize(
    "changes", [{"max_position_embeddings": ABSENT, "model_max_length": 4096}, {"num_hidden_layers": 40}]
)
def test_baichuan_13b_has_alibi(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = read(tmp_path, changes, tiny("BaichuanForCausalLM"))
    assert config.rope is None
    assert config.alibi == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
    assert config.max_position == changes.get("model_max_length", 128)
    with pytest.raises(UnsupportedModel, match="no rotary positions"):
        read(tmp_path, changes, tiny("BaichuanForCausalLM"), rope_scaling_factor=2.0)


@pytest.mark.parametrize("architecture", ["BailingMoeModel", "BailingMoeForSequenceClassification"])
def test_the_first_ling_chooses_experts_alike_without_its_head(tmp_path: Path, architecture: str) -> None:
    fields = {**tiny("BailingMoeV2ForCausalLM"), "score_function": "softmax"}
    config = read(tmp_path, {"architectures": [architecture]}, fields)
    assert config.experts is not None
    assert (config.experts.routing.scores, config.experts.corrected) == ("softmax", False)


@pytest.mark.parametrize("num_heads", [1, 2, 6, 12, 40, 71])
@pytest.mark.parametrize("max_bias", [8, 6])
def test_alibi_slopes(num_heads: int, max_bias: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bias = build_mpt_alibi_tensor(num_heads, 2, alibi_bias_max=max_bias)
    assert alibi_slopes(num_heads, max_bias=max_bias) == pytest.approx((-bias[:, 0, 0]).tolist(), rel=1e-6)


def test_falcon_40b_of_the_first_files(tmp_path: Path) -> None:
    """They name KV heads, and no new architecture; those of 7B name neither."""
    first = {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head": 4, "n_layer": 2}
    base = {"vocab_size": 320, "hidden_size": 64, "parallel_attn": True, "bias": False, "alibi": False, **first}
    large = read(tmp_path, {"n_head_kv": 2}, base)
    assert (large.num_kv_heads, large.parallel_norms, large.intermediate_size) == (2, 2, 256)
    small = read(tmp_path, {"multi_query": True, "model_type": "RefinedWebModel"}, base)
    assert (small.num_kv_heads, small.parallel_norms) == (1, 1)


def test_qwen_ends_where_its_training_did_unless_it_grows(tmp_path: Path) -> None:
    changes = {"max_position_embeddings": 32768, "fp16": True}
    config = read(tmp_path, changes, tiny("QWenLMHeadModel"))
    assert (config.max_position, config.intermediate_size, config.dtype) == (32768, 96, "float16")
    assert (config.dynamic_rope_from, config.query_scaling.length) == (32, 32)
    changes |= {"use_dynamic_ntk": False, "use_logn_attn": False}
    config = read(tmp_path, changes, tiny("QWenLMHeadModel"))
    assert (config.max_position, config.dynamic_rope_from, config.query_scaling) == (32, None, None)
    with pytest.raises(UnsupportedModel, match="rope_scaling_factor=0"):
        read(tmp_path, {}, tiny("QWenLMHeadModel"), rope_scaling_factor=2.0)


@pytest.mark.parametrize("model_type", [ABSENT, None, 3])
def test_neither_architecture_nor_type(tmp_path: Path, model_type: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match="architectures must be a list"):
        read(tmp_path, {"architectures": ABSENT, "model_type": model_type})


INVALID = [
    ("vocab_size", ABSENT),
    ("vocab_size", 0),
    ("vocab_size", -5),
    ("vocab_size", "320"),
    ("vocab_size", 320.5),
    ("vocab_size", True),
    ("vocab_size", 10**12),
    ("hidden_size", 66),
    ("hidden_size", [64]),
    ("intermediate_size", 0),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 10**6),
    ("num_attention_heads", 3),
    ("num_attention_heads", -4),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", 8),
    ("head_dim", 15),
    ("head_dim", -16),
    ("head_dim", 10**6),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 1e6),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", "1e-6"),
    ("tie_word_embeddings", 1),
    ("attention_bias", "false"),
    ("mlp_bias", 0),
    ("rope_theta", 0),
    ("rope_theta", 1),
    ("rope_theta", 10**400),
    ("vocab_size", 10**400),
    ("rope_theta", float("inf")),
    ("rope_theta", "1e4"),
    ("rope_scaling", "linear"),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "linear", "factor": "4"}),
    ("rope_scaling", {"type": "linear", "factor": 0.5}),
    ("rope_scaling", {"type": "dynamic", "factor": -2}),
    ("rope_scaling", {"type": "longrope", "short_factor": [1.0] * 8}),
    ("rope_scaling", {"type": "longrope", "long_factor": [1.0] * 7, "original_max_position_embeddings": 8}),
    ("rope_scaling", {"type": "longrope", "long_factor": [0.0] * 8, "original_max_position_embeddings": 8}),
    ("rope_scaling", {"type": "longrope", "long_factor": ["1"] * 8, "original_max_position_embeddings": 8}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 5.0, "high_freq_factor": 4.0}),
    ("rope_scaling", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}),
    ("rope_scaling", {"type": "yarn", "factor": 4.0, "truncate": "yes"}),
    ("architectures", "LlamaForCausalLM"),
]


@pytest.mark.parametrize(("key", "value"), INVALID, ids=lambda value: "absent" if value is ABSENT else None)
def test_impossible_values_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        read(tmp_path, {key: value})
    assert key.rpartition("_")[0] in str(caught.value) or key in str(caught.value)
    assert "config.json" in str(caught.value)


UNSUPPORTED = [
    ("hidden_act", "gelu"),
    ("hidden_act", 3),
    ("torch_dtype", "int8"),
    ("dtype", 16),
    ("quantization_config", {"quant_method": "hqq"}),
    ("use_logn_attn", True),
    ("dtype", "torch.int8"),
    ("partial_rotary_factor", 0.5),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("rope_scaling", {"type": "yarn", "factor": 4.0, "attn_factor": 2.0}),
    ("rope_scaling", {"type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}),
    ("rotary", {"type": "xpos"}),
    ("rope_scaling", {"type": "ntk_by_parts", "factor": 2.0}),
    ("rope_scaling", {"type": "mrope", "mrope_section": [2, 3, 3]}),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}),
    ("architectures", ["UnheardForCausalLM"]),
]


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, {key: value})
    assert key in str(caught.value) or "rope_type" in str(caught.value) or "type" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Gemma2ForCausalLM", "hidden_activation", "gelu"),
        ("Gemma2ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
        *(
            (name, "rope_parameters", {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0})
            for name in ("Gemma3ForCausalLM", "MellumForCausalLM", "Olmo3ForCausalLM")
        ),
        (
            "Lfm3ForCausalLM",
            "rope_parameters",
            {"sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        ),
        ("Qwen2ForCausalLM", "hidden_act", "relu"),
        ("Qwen2ForCausalLM", "layer_types", ["chunked_attention"] * 3),
        ("Lfm2ForCausalLM", "layer_types", ["conv", ["conv"], "conv", "conv"]),
        ("BambaForCausalLM", "time_step_limit", [0.0, {"__float__": "x"}]),
        ("MixtralForCausalLM", "hidden_act", "gelu"),
        ("GemmaForCausalLM", "hidden_act", "relu"),
        ("Ernie4_5_MoeForCausalLM", "moe_norm_min", 0.5),
        ("Phi3ForCausalLM", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("BloomForCausalLM", "apply_residual_connection_post_layernorm", True),
        ("Qwen2ForCausalLM", "is_causal", False),
        ("PhiForCausalLM", "model_type", "phi-msft"),
        ("MiniCPMForCausalLM", "use_output_gate", True),
        ("GPT2LMHeadModel", "scale_attn_by_inverse_layer_idx", True),
        ("GPT2LMHeadModel", "activation_function", "tanh"),
        ("GPTJForCausalLM", "tie_word_embeddings", True),
        ("MptForCausalLM", "logit_scale", 0.5),
        ("MptForCausalLM", "no_bias", False),
        ("OPTForCausalLM", "layer_norm_elementwise_affine", False),
        ("QWenLMHeadModel", "no_bias", False),
        ("BailingHybridForCausalLM", "linear_conv_kernel_dim", 4),
        ("ModernBertDecoderForCausalLM", "sliding_window", 9),
        ("Zamba2ForCausalLM", "hybrid_layer_ids", [3, 2, 1]),
    ],
)
def test_families_refuse_what_they_do_not_implement(tmp_path: Path, architecture: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read(tmp_path, {key: value}, tiny(architecture))


@pytest.mark.parametrize(("key", "value"), [("alibi", False), ("qk_ln", True), ("prefix_lm", True), ("kv_n_heads", 2)])
def test_mpt_refuses_other_attention(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"attn_config: {key}"):
        read(tmp_path, {"attn_config": {key: value}}, tiny("MptForCausalLM"))


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Gemma2ForCausalLM", "query_pre_attn_scalar", 0),
        ("Gemma2ForCausalLM", "attn_logit_softcapping", -1.0),
        ("Gemma2ForCausalLM", "layer_types", ["full_attention"]),
        ("MistralForCausalLM", "sliding_window", 0),
        ("MistralForCausalLM", "sliding_window", "8"),
        ("MixtralForCausalLM", "num_experts_per_tok", 5),
        ("MixtralForCausalLM", "num_local_experts", 0),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", [4]),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", "1"),
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", 0),
        ("InternLM2ForCausalLM", "bias", "no"),
        ("FalconForCausalLM", "num_kv_heads", 3),
        ("CodeGenForCausalLM", "n_head", 2),
        ("GPTJForCausalLM", "rotary_dim", 7),
        ("GPTJForCausalLM", "rotary_dim", 32),
        ("MptForCausalLM", "attn_config", 3),
        ("Phi3ForCausalLM", "partial_rotary_factor", 0.35),
        ("Phi3ForCausalLM", "partial_rotary_factor", 1.5),
        ("Qwen2ForCausalLM", "dual_chunk_attention_config", 3),
        ("QWenLMHeadModel", "intermediate_size", 1),
        ("QWenLMHeadModel", "visual", {"heads": 16}),
        ("QWenLMHeadModel", "bf16", "yes"),
        ("MiMoV2FlashForCausalLM", "num_experts_per_tok", 5),
    ],
)
def test_families_refuse_impossible_values(tmp_path: Path, architecture: str, key: str, value: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match=key):
        read(tmp_path, {key: value}, tiny(architecture))


def test_contexts_end_with_the_first_chunk(tmp_path: Path) -> None:
    chunks = {"dual_chunk_attention_config": {"chunk_size": 64}}
    config = read(tmp_path, chunks, tiny("Qwen2ForCausalLM"))
    assert (config.max_position, "dual_chunk" in config.beyond) == (64, True)
    assert not read(tmp_path, {}, tiny("Qwen2ForCausalLM")).beyond


def test_axes_of_qwen3_5_are_those_of_its_files(tmp_path: Path) -> None:
    """11 pairs turn by time, 11 by rows and 10 by columns: the rows' last is the last but one of 32."""
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
    text = {**tiny("Qwen3_5ForCausalLM"), "head_dim": 256, "rope_parameters": {"rope_type": "default", **rope}}
    fields = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "image_token_id": 5}
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = read(tmp_path, {"vision_config": {**tower, "deepstack_visual_indexes": []}}, fields)
    assert config.rope.axes == (0, 1, 2) * 10 + (0, 1)


@pytest.mark.parametrize("names", [ABSENT, None, []], ids=["absent", "null", "empty"])
def test_without_architectures_the_type_decides(tmp_path: Path, names: Any) -> None:
    assert read(tmp_path, {"architectures": names}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "CohereForCausalLM", "OPTForCausalLM"])
def test_swish_is_another_name_of_silu(tmp_path: Path, architecture: str) -> None:
    key = "activation_function" if architecture == "OPTForCausalLM" else "hidden_act"
    assert read(tmp_path, {key: "swish"}, tiny(architecture)).activation == "silu"


@pytest.mark.parametrize("name", ["Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "CohereForCausalLM"])
def test_command_models_have_bases_of_their_own(tmp_path: Path, name: str) -> None:
    rope = read(tmp_path, {}, tiny(name)).rope
    assert rope is not None
    assert rope.theta == (500000.0 if name == "CohereForCausalLM" else 10000.0)


@pytest.mark.parametrize(("ahead", "sliding"), [(ABSENT, [0, 2, 4]), (1, [1, 3])], ids=["absent", "one"])
def test_windows_of_command_a_plus_begin_behind_its_dense_layers(
    tmp_path: Path, ahead: Any, sliding: list[int]
) -> None:
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * 4, "first_k_dense_replace": ahead}
    windows = read(tmp_path, kinds, tiny("Cohere2MoeForCausalLM")).windows
    assert [layer for layer, window in enumerate(windows) if window is not None] == sliding


@pytest.mark.parametrize(("name", "factor"), [("Ministral3ForCausalLM", 16.0), ("Mistral4ForCausalLM", 128.0)])
@pytest.mark.parametrize("scaling", [ABSENT, None], ids=["absent", "null"])
def test_late_models_of_mistral_stretch_where_nothing_is_said(
    tmp_path: Path, name: str, factor: float, scaling: Any
) -> None:
    config = read(tmp_path, {"rope_parameters": ABSENT, "rope_scaling": scaling}, tiny(name))
    assert config.rope is not None
    assert (config.rope.kind, config.rope.factor) == ("yarn", factor)
    assert config.query_scaling is not None


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_heads_of_gemma_have_256_features_in_all_layers(tmp_path: Path, architecture: str) -> None:
    changes = {"head_dim": ABSENT, "global_head_dim": ABSENT}
    config = read(tmp_path, changes, tiny(architecture))
    local = [rope.dim for rope, window in zip(config.layer_ropes, config.windows, strict=True) if rope and window]
    assert set(local) == {config.head_dim} == {256}


def test_a_decoder_of_images_may_have_no_window(tmp_path: Path) -> None:
    """Mistral Small 3.1 says null, and Mistral 7B v0.1, whose class it is, has a window where nothing is said."""
    for window, expected in ((ABSENT, 4096), (None, None), (8, 8)):
        text = {key: value for key, value in tiny("MistralForCausalLM").items() if key != "sliding_window"}
        text |= {} if window is ABSENT else {"sliding_window": window}
        tower = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        tower |= {"num_attention_heads": 2, "head_dim": 16, "image_size": 32, "patch_size": 8, "num_channels": 3}
        fields = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
        fields |= {"text_config": text, "vision_config": tower, "image_token_index": 10}
        assert read(tmp_path, {}, fields).windows == (expected, expected)


@pytest.mark.parametrize(
    ("model_type", "missing"), [("deepseek_vl_v2", "language_config"), ("multi_modality", "aligner_config")]
)
def test_a_model_of_images_without_architectures(tmp_path: Path, model_type: str, missing: str) -> None:
    """Those of DeepSeek-VL have none. Both are read, and miss what describes their parts here."""
    with pytest.raises((InvalidCheckpoint, UnsupportedModel), match=missing):
        read(tmp_path, {"architectures": ABSENT, "model_type": model_type})


def test_an_unknown_class_is_told_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"The nearest name is Phi3ForCausalLM\."):
        read(tmp_path, {"architectures": ["Phi3LargeForCausalLM"]})


def test_remote_code_is_named_and_never_run(tmp_path: Path) -> None:
    changes = {"architectures": ["NewForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}
    with pytest.raises(UnsupportedModel, match=r"auto_map.*never run.*Implemented: .*LlamaForCausalLM"):
        read(tmp_path, changes)


def test_native_architecture_wins_over_remote_code(tmp_path: Path) -> None:
    assert read(tmp_path, {"auto_map": {"AutoModelForCausalLM": "modeling_llama.Llama"}}).vocab_size == 320


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=repr)
def test_unreadable_file(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        HFConfig.open(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="No such file"):
        HFConfig.open(tmp_path)
