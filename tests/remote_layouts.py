"""Checkpoints whose own code transformers does not have: a native model of equal computation, under their names.

The oracle is the native model; what is renamed here is written from what is known of the published files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import bailing_files, lara_layers
from tests.layout import Fields, Layout, Tensors, fused, renamed, under_language_model, unfused_experts
from tests.published_layouts import PUBLISHED
from tests.shrunk_layers import shrink_layers

__all__ = ["LAYOUTS", "RELATIVES", "Layout"]


def _scale_queries(model: nn.Module) -> None:
    """Qwen's queries behind 32 tokens, by the logarithm to that base of their place."""

    def scale(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        places = torch.arange(1, output.shape[1] + 1)
        return output * (places.log() / math.log(32)).clamp(min=1)[:, None]

    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.register_forward_hook(scale)


def _group(tensors: Tensors, fields: Fields) -> Tensors:
    """InternLM2: q, k and v of each KV head's group one after the other in wqkv."""
    grouped = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = (tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj"))
            groups = [part.unflatten(0, (fields["num_key_value_heads"], -1)) for part in parts]
            grouped[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, 1).flatten(0, 1)
        elif "k_proj" not in name and "v_proj" not in name:
            grouped[name] = tensor
    return renamed(_INTERNLM2)(grouped, fields)


_INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}
_QWEN = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}


def _unit_rows(tensors: Tensors) -> Tensors:
    """Baichuan2's head, which its code scales in every step."""
    return {**tensors, "lm_head.weight": nn.functional.normalize(tensors["lm_head.weight"])}


def _with_alibi(tokens: list[int]) -> Fields:
    """Llama's rotation of position 0, which is none, and a bias of 6 heads in the place of its mask (Press et al.)."""
    slopes = torch.tensor([2.0**-power for power in (2, 4, 6, 8, 1, 3)])
    positions = torch.arange(len(tokens))
    distances = positions[None, :] - positions[:, None]
    bias = slopes[:, None, None] * distances
    mask = bias.masked_fill(distances > 0, torch.finfo(torch.float32).min)[None]
    return {"attention_mask": mask, "position_ids": torch.zeros(1, len(tokens), dtype=torch.int64)}


def _with_frequencies(tensors: Tensors, fields: Fields) -> Tensors:
    """With the rotary buffers that Baichuan's files hold."""
    layers = range(fields["num_hidden_layers"])
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in layers}
    return {**fused(tensors, "self_attn.W_pack"), **buffers}


_BIAS_OF_LLAMA = ("attention_bias", "mlp_bias")
_NO_MLP_BIAS = {"mlp_bias": False}

_CHATGLM = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "lm_head": "transformer.output_layer",
}
_EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _chatglm(tensors: Tensors, fields: Fields) -> Tensors:
    """With the rotary buffer that its files hold."""
    buffer = {"transformer.rotary_pos_emb.inv_freq": torch.ones(8)}
    return {**renamed(_CHATGLM)(fused(tensors, "self_attention.query_key_value"), fields), **buffer}


def _deepseek_experts(model: nn.Module) -> None:
    """DeepSeek-MoE's experts are DeepSeek-V2's, chosen greedily."""
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    fields: Any = model.config
    config = DeepseekV2Config(
        hidden_size=fields.hidden_size,
        n_routed_experts=fields.n_routed_experts,
        num_experts_per_tok=fields.num_experts_per_tok,
        n_shared_experts=fields.n_shared_experts,
        moe_intermediate_size=fields.moe_intermediate_size,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for layer in layers[fields.first_k_dense_replace :]:
        layer.mlp = DeepseekV2Moe(config)


def _layer_norms(model: nn.Module) -> None:
    """Orion's norms in Llama."""
    fields: Any = model.config
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.LayerNorm(fields.hidden_size, eps=fields.rms_norm_eps))


def _first_of_groups(tensors: Tensors) -> Tensors:
    """MPT's keys and values, 6 heads of 16, for the first of each 3."""
    return _of_groups(tensors, lambda part: part.unflatten(0, (2, 3, 16))[:, 0])


def _repeated_in_groups(tensors: Tensors) -> Tensors:
    """Those for all heads, from the first of each 3."""
    return _of_groups(
        tensors, lambda part: part.unflatten(0, (2, 3, 16))[:, :1].expand(2, 3, 16, -1).reshape(6, 16, -1)
    )


def _of_groups(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("Wqkv.weight"):
            q, k, v = tensor.chunk(3)
            changed[name] = torch.cat([q, *(change(part).flatten(0, 1) for part in (k, v))])
    return changed


LAYOUTS: dict[str, Layout] = {
    **PUBLISHED,
    "aquila": Layout("llama", "aquila", "llama", "AquilaForCausalLM", dropped=_BIAS_OF_LLAMA),
    "iquest_coder": Layout("llama", "iquestcoder", "llama", "IQuestCoderForCausalLM", dropped=_BIAS_OF_LLAMA),
    "baichuan": Layout(
        "baichuan",
        "baichuan",
        "llama",
        "BaichuanForCausalLM",
        native={"num_key_value_heads": 4},
        rename=_with_frequencies,
        oracle=_unit_rows,
    ),
    "baichuan_first": Layout(
        "baichuan",
        "baichuan",
        "llama",
        "BaiChuanForCausalLM",
        native={"num_key_value_heads": 4},
        rename=lambda tensors, fields: fused(tensors, "self_attn.W_pack"),
    ),
    "decilm": Layout(
        "decilm", "nemotron-nas", "llama", "DeciLMForCausalLM", native={"intermediate_size": 96}, patch=shrink_layers
    ),
    "deepseek": Layout(
        "deepseek", "deepseek", "llama", "DeepseekForCausalLM", patch=_deepseek_experts, rename=unfused_experts
    ),
    "cohere_plain": Layout("cohere", "cohere", "cohere", "CohereForCausalLM", dropped=("use_qk_norm",)),
    "deepseek_v2_lite": Layout(
        "deepseek_v2",
        "deepseek_v2",
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        extra={"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "attention_bias": False},
    ),
    "baichuan_13b": Layout(
        "baichuan",
        "baichuan",
        "llama",
        "BaichuanForCausalLM",
        extra={"hidden_size": 96, "num_attention_heads": 6, "model_max_length": 256},
        dropped=("max_position_embeddings",),
        words={"model_max_length": "max_position_embeddings"},
        native={"num_key_value_heads": 6},
        rename=lambda tensors, fields: fused(tensors, "self_attn.W_pack"),
        oracle=_unit_rows,
        call=_with_alibi,
    ),
    "chatglm": Layout(
        "chatglm",
        "chatglm",
        "glm",
        "ChatGLMModel",
        words={
            "padded_vocab_size": "vocab_size",
            "ffn_hidden_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "multi_query_group_num": "num_key_value_heads",
            "kv_channels": "head_dim",
            "seq_length": "max_position_embeddings",
            "layernorm_epsilon": "rms_norm_eps",
        },
        rope=lambda fields: {"rope_theta": 10000 * fields["rope_ratio"], "partial_rotary_factor": 0.5},
        rename=_chatglm,
    ),
    "exaone": Layout(
        "exaone",
        "exaone",
        "llama",
        "ExaoneForCausalLM",
        words={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"},
        rename=renamed(_EXAONE),
    ),
    "falcon_7b": Layout(
        "falcon",
        "falcon",
        "falcon",
        "FalconForCausalLM",
        extra={"multi_query": True, "parallel_attn": True, "bias": False},
        dropped=("new_decoder_architecture", "num_kv_heads"),
    ),
    "falcon_11b": Layout("falcon", "falcon", "falcon", "FalconForCausalLM", extra={"num_ln_in_parallel_attn": 1}),
    "falcon_rw": Layout(
        "falcon",
        "falcon",
        "falcon",
        "FalconForCausalLM",
        extra={"multi_query": False, "parallel_attn": False, "alibi": True},
        dropped=("new_decoder_architecture", "num_kv_heads"),
    ),
    "lara_mini": Layout(
        "lara_mini",
        "lara_mini",
        "flint",
        "LaraMiniForCausalLM",
        native=lara_layers.NATIVE,
        patch=lara_layers.take_layers,
        rename=lara_layers.join_inputs,
        oracle=lara_layers.stack_experts,
    ),
    "falcon_mamba": Layout(
        "mamba",
        "falcon_mamba",
        "falcon_mamba",
        "FalconMambaForCausalLM",
        extra={"mixer_rms_eps": 0.1, "tie_word_embeddings": False},
    ),
    "gpt_neox_sequential": Layout(
        "gpt_neox", "gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", extra={"use_parallel_residual": False}
    ),
    "llama4_vision": Layout(
        "llama4",
        "llama4",
        "llama4_text",
        "Llama4ForConditionalGeneration",
        # As the published files have them.
        extra={"attn_temperature_tuning": 4, "no_rope_layers": []},
        native={"attn_temperature_tuning": True},
        nested="text_config",
        rename=lambda tensors, fields: {
            **{f"language_model.{name}": tensor for name, tensor in tensors.items()},
            "vision_model.layernorm_pre.weight": torch.ones(8),
            "multi_modal_projector.linear_1.weight": torch.ones(8, 8),
        },
    ),
    "bailing": Layout(
        "bailing",
        "bailing_moe",
        "glm4_moe",
        "BailingMoeV2ForCausalLM",
        words=bailing_files.WORDS,
        rename=bailing_files.rename,
    ),
    "sarvam_moe": Layout(
        "sarvam_moe",
        "sarvam_moe",
        "glm4_moe",
        "SarvamMoEForCausalLM",
        words=bailing_files.WORDS,
        native={"partial_rotary_factor": 1.0},
        rename=bailing_files.rename,
    ),
    "sarvam_mla": Layout(
        "sarvam_mla",
        "sarvam_mla",
        "deepseek_v3",
        "SarvamMLAForCausalLM",
        words={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    ),
    "bailing_first": Layout(
        "bailing",
        "bailing_moe",
        "llama",
        "BailingMoeForCausalLM",
        extra={"norm_topk_prob": False, "score_function": "softmax", "norm_head": True},
        dropped=(
            *("partial_rotary_factor", "use_qk_norm", "n_group", "topk_group", "first_k_dense_replace"),
            *("routed_scaling_factor", "use_qkv_bias", "moe_router_enable_expert_bias"),
        ),
        words=bailing_files.WORDS,
        native={"first_k_dense_replace": 0},
        patch=_deepseek_experts,
        rename=bailing_files.rename,
        oracle=bailing_files.unit_columns,
    ),
    "gemma3n_towers": Layout(
        "gemma3n",
        "gemma3n",
        "gemma3n_text",
        "Gemma3nForConditionalGeneration",
        extra={"activation_sparsity_pattern": None, "intermediate_size": 96},
        nested="text_config",
        rename=lambda tensors, fields: under_language_model(
            tensors, {"model.embed_vision.embedding.weight": torch.ones(8, 8)}
        ),
    ),
    "gemma4_towers": Layout(
        "gemma4",
        "gemma4",
        "gemma4_text",
        "Gemma4ForConditionalGeneration",
        extra={"attention_k_eq_v": False, "use_double_wide_mlp": False},
        dropped=("num_global_key_value_heads",),
        nested="text_config",
        rename=lambda tensors, fields: under_language_model(
            tensors,
            {
                "model.language_model.layers.5.self_attn.k_proj.weight": torch.ones(24, 64),
                "model.vision_tower.patch_embedder.input_proj.weight": torch.ones(8, 8),
                "model.embed_audio.embedding_projection.weight": torch.ones(8, 8),
            },
        ),
    ),
    "gemma4_12b": Layout(
        "gemma4",
        "gemma4_unified_text",
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        dropped=("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"),
    ),
    "gemma4_26b": Layout(
        "gemma4",
        "gemma4_text",
        "gemma4_text",
        "Gemma4ForCausalLM",
        extra={
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True},
            **{"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
        },
    ),
    "gemma4_31b": Layout(
        "gemma4",
        "gemma4_text",
        "gemma4_text",
        "Gemma4ForCausalLM",
        extra={"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "falcon_h1_plain": Layout(
        "falcon_h1",
        "falcon_h1",
        "falcon_h1",
        "FalconH1ForCausalLM",
        extra={"mamba_rms_norm": False, "mamba_d_ssm": None, "mamba_d_head": "auto"},
        dropped=("mlp_multipliers", "ssm_multipliers", "key_multiplier", "mamba_norm_before_gate"),
    ),
    "granite_4_dense": Layout(
        "granite_hybrid",
        "granitemoehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        extra={"num_local_experts": 0, "mamba_proj_bias": False, "mamba_n_groups": 1, "mamba_d_head": "auto"},
        dropped=("position_embedding_type",),
    ),
    "internlm": Layout(
        "llama",
        "internlm",
        "llama",
        "InternLMForCausalLM",
        extra={"bias": True},
        dropped=_BIAS_OF_LLAMA,
        words={"bias": "attention_bias"},
        native=_NO_MLP_BIAS,
    ),
    "gpt_bigcode_heads": Layout(
        "gpt_bigcode", "gpt_bigcode", "gpt_bigcode", "GPTBigCodeForCausalLM", extra={"multi_query": False}
    ),
    "internlm2": Layout(
        "internlm2",
        "internlm2",
        "llama",
        "InternLM2ForCausalLM",
        words={"bias": "attention_bias"},
        native=_NO_MLP_BIAS,
        rename=_group,
    ),
    "internlm3": Layout(
        "llama",
        "internlm3",
        "llama",
        "InternLM3ForCausalLM",
        extra={"qkv_bias": True, "bias": True, "head_dim": 24},
        dropped=_BIAS_OF_LLAMA,
        words={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "kimi_k2": Layout(
        "deepseek_v3",
        "kimi_k2",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        extra={"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    ),
    "mimo": Layout(
        "qwen2",
        "mimo",
        "qwen2",
        "MiMoForCausalLM",
        extra={"attention_bias": True, "num_nextn_predict_layers": 1, "use_sliding_window": False},
        dropped=("sliding_window", "max_window_layers"),
        rename=lambda tensors, fields: {
            **tensors,
            "model.mtp_layers.0.input_proj.weight": torch.ones(64, 128),
            "model.mtp_layers.0.self_attn.q_proj.weight": torch.ones(64, 64),
        },
    ),
    "minicpm": Layout(
        "granite",
        "minicpm",
        "granite",
        "MiniCPMForCausalLM",
        extra={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
        dropped=_MULTIPLIERS,
        native={
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "attention_multiplier": 16**-0.5,
            "logits_scaling": 4.0,
        },
    ),
    "ministral": Layout(
        "mistral",
        "ministral",
        "ministral",
        "MinistralForCausalLM",
        extra={"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite_moe_shared": Layout(
        "granite_moe",
        "granitemoeshared",
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        extra={"shared_intermediate_size": 48},
    ),
    "mpt_grouped": Layout(
        "mpt",
        "mpt",
        "mpt",
        "MPTForCausalLM",
        extra={
            "attn_config": {
                "attn_type": "grouped_query_attention",
                "kv_n_heads": 2,
                "clip_qkv": 1.0,
                "softmax_scale": 0.3,
            }
        },
        native={"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3}},
        rename=lambda tensors, fields: _first_of_groups(tensors),
        oracle=_repeated_in_groups,
    ),
    "orion": Layout("orion", "orion", "llama", "OrionForCausalLM", patch=_layer_norms),
    "phi4_mini": Layout(
        "phi3",
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        extra={"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        dropped=("sliding_window",),
    ),
    "qwen": Layout(
        "qwen",
        "qwen",
        "qwen2",
        "QWenLMHeadModel",
        words={
            "kv_channels": "head_dim",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        rope=lambda fields: {"rope_theta": fields["rotary_emb_base"]},
        rename=lambda tensors, fields: renamed(_QWEN)(fused(tensors, "attn.c_attn"), fields),
        patch=_scale_queries,
    ),
    "nemotron_h_experts": Layout(
        "nemotron_h",
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        extra={
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 48,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_pattern": Layout(
        "nemotron_h",
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        extra={"hybrid_override_pattern": "M-*MEMM", "num_hidden_layers": 7, "use_bias": False, "mlp_bias": False},
        dropped=("layers_block_type",),
    ),
    "opt_350m": Layout(
        "opt", "opt", "opt", "OPTForCausalLM", extra={"word_embed_proj_dim": 40, "do_layer_norm_before": False}
    ),
    "phi_plain": Layout("phi", "phi", "phi", "PhiForCausalLM", dropped=("qk_layernorm",)),
    "seed_oss": Layout(
        "llama",
        "seed_oss",
        "seed_oss",
        "SeedOssForCausalLM",
        extra={"attention_out_bias": True, "head_dim": 24},
    ),
    "stablelm_parallel": Layout(
        "stablelm", "stablelm", "stablelm", "StableLmForCausalLM", extra={"use_parallel_residual": True}
    ),
    "stablelm_12b": Layout(
        "stablelm",
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        extra={"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False},
    ),
    "xverse": Layout(
        "llama",
        "xverse",
        "llama",
        "XverseForCausalLM",
        dropped=(*_BIAS_OF_LLAMA, "num_key_value_heads"),
        native={"num_key_value_heads": 4},
    ),
    "yi": Layout(
        "llama",
        "Yi",
        "llama",
        "YiForCausalLM",
        dropped=_BIAS_OF_LLAMA,
        rename=renamed({"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}),
    ),
}
"""By the name under which `tests.checkpoints.build_checkpoint` writes it."""

RELATIVES = sorted(name for name, layout in LAYOUTS.items() if layout.family != name)
"""Checkpoints that a family of another name reads."""
