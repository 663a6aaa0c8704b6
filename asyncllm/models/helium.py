"""Helium: Llama with rotation of neighbouring pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Helium"]


@register(HeliumForCausalLM="Helium 1 2B")
class Helium(DecoderLM):
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "helium",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "mlp_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        return ModelConfig(
            **hf.decoder(architecture, max_position=4096, theta=100000.0, head_dim=128, norm_eps=1e-8),
            qkv_bias=hf.flag("attention_bias", False),
            mlp_bias=hf.flag("mlp_bias", False),
            paired_rotary=True,
        )
