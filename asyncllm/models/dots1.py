"""dots.llm1: Qwen3's attention and DeepSeek-V3's routing of experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.glm4_moe import Glm4MoE
from asyncllm.models.grouped_experts import grouped_experts, grouped_routing
from asyncllm.models.registry import register

__all__ = ["Dots1"]


@register(Dots1ForCausalLM="dots.llm1")
class Dots1(DecoderLM):
    weights = Glm4MoE.weights
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "dots1",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        # Published files have the name of the method here.
        hf.expect("scoring_func", "sigmoid", "noaux_tc")
        hf.expect("topk_method", "noaux_tc")
        fields = hf.decoder(architecture)
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        full = hf.integer("max_window_layers", 62, minimum=0)
        window = hf.optional_integer("sliding_window", 4096)
        fields["windows"] = hf.windows(num_layers, window, [layer >= full for layer in range(num_layers)])
        experts = grouped_experts(
            hf,
            num_layers,
            first=hf.integer("first_k_dense_replace", 0, minimum=0),
            count=hf.integer("n_routed_experts"),
            shared=hf.integer("n_shared_experts", 0, minimum=0),
            size=hf.integer("moe_intermediate_size", 1408),
            corrected=True,
            routing=grouped_routing(hf, renormalize=False),
        )
        return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, qk_norm="head", experts=experts)
