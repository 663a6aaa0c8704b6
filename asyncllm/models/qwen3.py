"""Qwen3, dense: per-head RMS norms of q and k before the rotation, and heads of a size of their own."""

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
from asyncllm.models.qwen2 import qwen_windows
from asyncllm.models.registry import register

__all__ = ["QWEN3_WEIGHTS", "Qwen3", "Qwen3Config"]

QWEN3_WEIGHTS = LLAMA_WEIGHTS.replaced(
    {
        "model.layers.{i}.self_attn.q_norm": "layers.{i}.attn.q_norm",
        "model.layers.{i}.self_attn.k_norm": "layers.{i}.attn.k_norm",
    }
)


class Qwen3Config(ModelConfig, frozen=True, kw_only=True):
    attention_bias: bool
    """Biases of q, k, v and the output projection."""


@register("Qwen3ForCausalLM")
class Qwen3(DecoderLM):
    config: Qwen3Config
    weights = QWEN3_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> Qwen3Config:
        hf.expect("hidden_act", "silu")
        config = Qwen3Config(
            **hf.decoder(architecture, max_position=32768, head_dim=128),
            attention_bias=hf.flag("attention_bias", False),
        )
        return msgspec.structs.replace(config, windows=qwen_windows(hf, config.num_layers))

    def block(self, layer: int) -> Block:
        config = self.config
        return Block(
            attn_norm=RMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                window=config.windows[layer],
                qk_norm_eps=config.rms_eps,
            ),
            mlp_norm=RMSNorm(config.hidden_size, config.rms_eps),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size),
        )
