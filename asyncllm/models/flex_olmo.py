"""FlexOlmo: OLMo 2's norms, and OLMoE's experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.olmo2 import Olmo2
from asyncllm.models.olmoe import Olmoe
from asyncllm.models.qwen3_moe import QWEN_EXPERTS
from asyncllm.models.registry import register

__all__ = ["FlexOlmo"]

_USUAL = {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "num_experts": 7, "num_experts_per_tok": 5}


@register(FlexOlmoForCausalLM="FlexOlmo 7x7B")
class FlexOlmo(Olmo2):
    weights = Olmo2.weights.replaced(QWEN_EXPERTS)
    tiny: ClassVar[dict[str, Any]] = {**Olmoe.tiny, "model_type": "flex_olmo"}

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        return Olmoe.configure(hf.completed(_USUAL), architecture)
