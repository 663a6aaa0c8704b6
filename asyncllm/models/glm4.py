"""GLM-4-0414 and GLM-Z1: GLM-4-9B with additional norms after each branch."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.gemma2 import Gemma2
from asyncllm.models.glm import Glm
from asyncllm.models.registry import register

__all__ = ["Glm4"]


@register(Glm4ForCausalLM="GLM-4-0414, GLM-Z1")
class Glm4(Glm):
    weights = Glm.weights.replaced(
        {
            "model.layers.{i}.post_self_attn_layernorm": "layers.{i}.attn_post_norm",
            "model.layers.{i}.post_mlp_layernorm": "layers.{i}.mlp_post_norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {**Glm.tiny, "model_type": "glm4"}

    block = Gemma2.block

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        extra = hf.integer("num_nextn_predict_layers", 0, minimum=0)
        return msgspec.structs.replace(Glm.configure(hf, architecture), extra_layers=extra)
