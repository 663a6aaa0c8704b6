"""OLMo 1: Llama with layer norms without weights, and clipped queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import UnitLayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Olmo"]


@register(OlmoForCausalLM="OLMo 1B, 7B, the first generation")
class Olmo(DecoderLM):
    weights = LLAMA_WEIGHTS.without(
        "model.layers.{i}.input_layernorm", "model.layers.{i}.post_attention_layernorm", "model.norm"
    )
    norm_class = UnitLayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "olmo",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "clip_qkv": 0.8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        bias = hf.flag("attention_bias", False)
        fields = {**hf.decoder(architecture), "norm_eps": 1e-5}
        return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, qkv_clip=hf.optional_number("clip_qkv"))
