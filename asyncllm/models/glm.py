"""GLM-4-9B: Llama with half of each head rotated, in neighbouring pairs, and gate and up in one tensor."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Glm"]


@register(GlmForCausalLM="GLM-4-9B, GLM-Edge")
class Glm(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced({"model.layers.{i}.mlp.gate_up_proj": "layers.{i}.mlp.gate_up[gate+up]"})
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "glm",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf = hf.changed({"partial_rotary_factor": hf.fields.get("partial_rotary_factor", 0.5)})
        fields = hf.decoder(architecture, max_position=131072, norm_eps=1.5625e-7, head_dim=128, partial_rotary=1.0)
        return ModelConfig(**fields, paired_rotary=True, qkv_bias=hf.flag("attention_bias", True))
