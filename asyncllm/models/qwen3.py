"""Qwen3, dense: RMS norms of each head's q and k before the rotation, and an independent head size."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.qwen2 import qwen_windows
from asyncllm.models.registry import register

__all__ = ["QWEN3_WEIGHTS", "Qwen3"]

QWEN3_WEIGHTS = LLAMA_WEIGHTS.replaced(
    {
        "model.layers.{i}.self_attn.q_norm": "layers.{i}.attn.q_norm",
        "model.layers.{i}.self_attn.k_norm": "layers.{i}.attn.k_norm",
    }
)


@register(Qwen3ForCausalLM="Qwen3, Qwen3-Embedding")
class Qwen3(DecoderLM):
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
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=32768, head_dim=128)
        fields["windows"] = qwen_windows(hf, fields["num_layers"])
        bias = hf.flag("attention_bias", False)
        return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, qk_norm="head")
