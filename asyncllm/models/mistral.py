"""Mistral: Llama with a sliding window in every layer (v0.1) or none (later versions). Ministral has one in the layers
that layer_types names."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Mistral"]


@register(MistralForCausalLM="Mistral 7B v0.1 to v0.3, Nemo, Small, Codestral", MinistralForCausalLM="Ministral 8B")
class Mistral(DecoderLM):
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mistral",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=131072)
        fields["windows"] = hf.windows(fields["num_layers"], hf.optional_integer("sliding_window", 4096))
        return ModelConfig(**fields)
