"""Jais 2: layer norms and biases, and a plain MLP with squared ReLU."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.arcee import Arcee
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register

__all__ = ["Jais2"]


@register(Jais2ForCausalLM="Jais 2 8B, 70B")
class Jais2(DecoderLM):
    weights = Arcee.weights
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "jais2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "relu2")
        bias = hf.flag("attention_bias", True)
        named = hf.named({"layer_norm_eps": "rms_norm_eps"})
        return ModelConfig(
            **named.decoder(architecture, max_position=8192, norm_eps=1e-5),
            qkv_bias=bias,
            out_bias=bias,
            gated=False,
            activation="squared_relu",
            mlp_bias=hf.flag("mlp_bias", True),
        )
