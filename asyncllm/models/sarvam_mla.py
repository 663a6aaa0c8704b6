"""Sarvam 105B: DeepSeek-V3's computation with other defaults."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v3 import DeepseekV3
from asyncllm.models.registry import register

__all__ = ["SarvamMLA"]

_WORDS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
"""What the published files have -> what DeepSeek's have."""
_USUAL = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


@register(SarvamMLAForCausalLM="Sarvam 105B")
class SarvamMLA(DeepseekV3):
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepseekV3.tiny.items() if not key.startswith("n_") and key != "topk_method"},
        "model_type": "sarvam_mla",
        "num_experts": 8,
        "num_shared_experts": 1,
        "n_group": 4,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(_WORDS)
        scaling = hf.fields.get("rope_scaling")
        if isinstance(scaling, dict) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
            others = {key: value for key, value in scaling.items() if key != "type"}
            hf = hf.changed({"rope_scaling": {**others, "rope_type": "yarn"}})
        return DeepseekV3.configure(hf.completed(_USUAL), architecture)
