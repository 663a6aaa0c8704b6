"""Orion: Llama with layer norms."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Orion"]


@register(OrionForCausalLM="Orion 14B")
class Orion(DecoderLM):
    weights = LLAMA_WEIGHTS
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "orion",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        return ModelConfig(**hf.decoder(architecture, norm_eps=1e-5))
