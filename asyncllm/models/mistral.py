"""Mistral: Llama with a sliding window in every layer (v0.1), or none (later versions)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.norm import RMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Mistral"]


@register("MistralForCausalLM")
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
        config = ModelConfig(**hf.decoder(architecture, max_position=131072))
        window = hf.optional_integer("sliding_window", 4096)
        windows = hf.windows(config.num_layers, window, [True] * config.num_layers)
        return msgspec.structs.replace(config, windows=windows)

    def block(self, layer: int) -> Block:
        config = self.config
        return Block(
            attn_norm=RMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                window=config.windows[layer],
            ),
            mlp_norm=RMSNorm(config.hidden_size, config.rms_eps),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size),
        )
