"""Sarvam 30B: Ling 2.0's computation with other defaults."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.bailing import Bailing, BailingConfig
from asyncllm.models.config import HFConfig
from asyncllm.models.registry import register

__all__ = ["SarvamMoE"]

_WORDS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
}
"""What transformers writes -> what the published files have."""
_USUAL = {
    "num_experts": 128,
    "num_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 64,
    "rope_theta": 8e6,
    "max_position_embeddings": 131072,
}


@register(SarvamMoEForCausalLM="Sarvam 30B")
class SarvamMoE(Bailing):
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in Bailing.tiny.items() if key != "partial_rotary_factor"},
        "model_type": "sarvam_moe",
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> BailingConfig:
        hf = hf.named({key: word for key, word in _WORDS.items() if hf.fields.get(word) is None})
        return Bailing.configure(hf.completed(_USUAL), architecture)
