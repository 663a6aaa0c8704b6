"""Solar Open: GLM-4.5's experts in every layer, and Llama's attention."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.glm4_moe import Glm4MoE
from asyncllm.models.grouped_experts import grouped_experts, grouped_routing
from asyncllm.models.registry import register

__all__ = ["SolarOpen"]


@register(SolarOpenForCausalLM="Solar Open 100B")
class SolarOpen(DecoderLM):
    weights = Glm4MoE.weights
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "solar_open",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("first_k_dense_replace", 0)
        hf.expect("use_qk_norm", False)
        size = hf.integer("moe_intermediate_size", 1280)
        # Published files name an intermediate_size too, which no layer uses.
        fields = hf.changed({"intermediate_size": size}).decoder(
            architecture, max_position=131072, theta=1e6, head_dim=128, norm_eps=1e-5, partial_rotary=1.0
        )
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=0,
            count=hf.integer("n_routed_experts", 128),
            shared=hf.integer("n_shared_experts", 1, minimum=0),
            size=size,
            corrected=True,
            routing=grouped_routing(hf, top_k=8),
        )
        return ModelConfig(**fields, qkv_bias=hf.flag("attention_bias", False), experts=experts)
