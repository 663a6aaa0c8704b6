"""Mellum 2: Qwen3-MoE's layers, some with a window and a rotation of their own, and experts in all or some of them."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.qwen3_moe import Qwen3MoE, qwen_experts
from asyncllm.models.registry import register

__all__ = ["Mellum"]


@register(MellumForCausalLM="Mellum 2 12B-A2.5B")
class Mellum(DecoderLM):
    # Its layer that predicts further tokens is not loaded.
    weights = Qwen3MoE.weights.skipping("mtp")
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mellum",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.of_layers("full_attention").decoder(architecture, max_position=131072, theta=5e5, head_dim=128)
        num_layers = fields["num_layers"]
        window = hf.optional_integer("sliding_window", 1024)
        fields["windows"] = hf.windows(num_layers, window, [False] * num_layers)
        theta = hf.number("rope_local_base_freq", 1e4)
        local = hf.of_layers("sliding_attention").changed(
            {"rope_theta": theta, "rope_scaling": None}, rope_scaling_factor=0.0
        )
        local_rope = local.decoder(architecture, head_dim=128)["rope"]
        kinds = hf.fields.get("mlp_layer_types") or ["sparse"] * num_layers
        if not isinstance(kinds, list) or len(kinds) != num_layers or set(map(str, kinds)) - {"dense", "sparse"}:
            hf.invalid("mlp_layer_types", f"where 'dense' or 'sparse' belongs for each of {num_layers} layers")
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        hf = hf.changed({"mlp_only_layers": dense, "norm_topk_prob": hf.flag("norm_topk_prob", True)})
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **fields,
            layer_ropes=tuple(fields["rope"] if each is None else local_rope for each in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            experts=qwen_experts(hf, num_layers, count=64, per_token=8, size=896),
        )
