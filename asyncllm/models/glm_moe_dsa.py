"""GLM-5: DeepSeek-V3.2's computation with other defaults, and layers that share an index."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v32 import DeepseekV32
from asyncllm.models.registry import register

__all__ = ["GlmMoEDsa"]

_USUAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1}


@register(GlmMoeDsaForCausalLM="GLM-5, in contexts of 2,048 tokens")
class GlmMoEDsa(DeepseekV32):
    tiny: ClassVar[dict[str, Any]] = {
        **DeepseekV32.tiny,
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared"],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        absent = {key: value for key, value in _USUAL.items() if hf.fields.get(key) is None}
        return DeepseekV32.configure(hf.changed(absent), architecture)
