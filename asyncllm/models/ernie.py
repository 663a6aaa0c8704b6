"""ERNIE 4.5, dense: Llama with rotation of neighbouring pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Ernie"]


@register(Ernie4_5ForCausalLM="ERNIE 4.5 0.3B", Ernie4_5_ForCausalLM="the first files of it")
class Ernie(DecoderLM):
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "ernie4_5",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "use_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=131072, theta=5e5, norm_eps=1e-5, head_dim=128, tied=True)
        bias = hf.flag("use_bias", False)
        return ModelConfig(**fields, paired_rotary=True, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
