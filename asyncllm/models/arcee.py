"""Arcee's AFM: Llama with a plain MLP and squared ReLU."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Arcee"]


@register(ArceeForCausalLM="AFM 4.5B")
class Arcee(DecoderLM):
    weights = LLAMA_WEIGHTS.without("model.layers.{i}.mlp.gate_proj").replaced(
        {"model.layers.{i}.mlp.up_proj": "layers.{i}.mlp.up"}
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "arcee",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "mlp_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "relu2")
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture, max_position=4096, norm_eps=1e-5),
            qkv_bias=bias,
            out_bias=bias,
            gated=False,
            activation="squared_relu",
            mlp_bias=hf.flag("mlp_bias", False),
        )
