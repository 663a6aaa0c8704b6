"""GLM-4.7-Flash: DeepSeek-V3's computation with other defaults."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v3 import DeepseekV3
from asyncllm.models.grouped_experts import leading_dense
from asyncllm.models.registry import register

__all__ = ["Glm4MoELite"]

_USUAL = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}


@register(Glm4MoeLiteForCausalLM="GLM-4.7-Flash")
class Glm4MoELite(DeepseekV3):
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepseekV3.tiny.items() if key != "first_k_dense_replace"},
        "model_type": "glm4_moe_lite",
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        dense = leading_dense(hf, hf.integer("num_hidden_layers"), 1)
        return DeepseekV3.configure(hf.completed(_USUAL).changed({"first_k_dense_replace": dense}), architecture)
