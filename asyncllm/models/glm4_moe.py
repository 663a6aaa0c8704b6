"""GLM-4.5 and 4.6: half of each head rotated, and DeepSeek-V3's routing of experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Glm4MoE"]


@register(Glm4MoeForCausalLM="GLM-4.5, GLM-4.5-Air, GLM-4.6")
class Glm4MoE(DecoderLM):
    weights = QWEN3_WEIGHTS.replaced(
        {**DEEPSEEK_EXPERTS, "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias"}
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "glm4_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
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
        hf = hf.changed({"partial_rotary_factor": hf.fields.get("partial_rotary_factor", 0.5)})
        fields = hf.decoder(architecture, max_position=131072, norm_eps=1e-5, partial_rotary=True)
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=hf.integer("first_k_dense_replace", 1, minimum=0),
            count=hf.integer("n_routed_experts", 128),
            shared=hf.integer("n_shared_experts", 1, minimum=0),
            size=hf.integer("moe_intermediate_size", 1408),
            corrected=True,
            routing=grouped_routing(hf, top_k=8),
        )
        return ModelConfig(
            **fields,
            qkv_bias=hf.flag("attention_bias", False),
            qk_norm="head" if hf.flag("use_qk_norm", False) else None,
            experts=experts,
            extra_layers=hf.integer("num_nextn_predict_layers", 1, minimum=0),
        )
