"""Youtu-LLM: DeepSeek's latent attention, and an MLP in every layer.

The padding token's embedding is the one in the file. transformers sets it to zero after reading the file, so `asyncllm
debug compare` shows a difference for this token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register

__all__ = ["Youtu"]

_USUAL = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@register(YoutuForCausalLM="Youtu-LLM 2B")
class Youtu(LatentDecoder):
    weights = LATENT_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "youtu",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "tie_word_embeddings": False,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("mlp_bias", False)
        hf = hf.changed({key: value for key, value in _USUAL.items() if key not in hf.fields})
        fields = latent_fields(hf, architecture, max_position=131072, tied=True)
        return LatentConfig(**fields, interleaved=hf.flag("rope_interleave", True))
