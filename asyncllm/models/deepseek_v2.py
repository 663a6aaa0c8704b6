"""DeepSeek-V2, V2.5 and V2-Lite: experts chosen by softmax; in the large models, from the best groups."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, expert_groups, grouped_experts
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register

__all__ = ["DeepseekV2"]


@register(DeepseekV2ForCausalLM="DeepSeek-V2, V2-Lite, V2.5, Coder-V2")
class DeepseekV2(LatentDecoder):
    weights = LATENT_WEIGHTS.replaced(DEEPSEEK_EXPERTS)
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "deepseek_v2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("topk_method", "greedy", "group_limited_greedy")
        hf.expect("scoring_func", "softmax")
        hf.expect("norm_topk_prob", False)
        fields = latent_fields(hf, architecture)
        grouped = hf.fields.get("topk_method") == "group_limited_greedy"
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=hf.integer("first_k_dense_replace", 0, minimum=0),
            count=hf.integer("n_routed_experts", 64),
            shared=hf.integer("n_shared_experts", 2),
            size=hf.integer("moe_intermediate_size", 1407),
            routing=Routing(
                hf.integer("num_experts_per_tok"),
                scale=hf.number("routed_scaling_factor", 1.0),
                **(expert_groups(hf) if grouped else {}),
            ),
        )
        return LatentConfig(**fields, experts=experts, interleaved=True)
