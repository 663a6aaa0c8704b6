"""Nemotron: layer norms that store weight - 1, plain MLPs with squared ReLU, a part of each head rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import OffsetLayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Nemotron"]


@register(NemotronForCausalLM="Nemotron-3 and Nemotron-4, Minitron")
class Nemotron(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced({"model.layers.{i}.mlp.up_proj": "layers.{i}.mlp.up"})
    norm_class = OffsetLayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "nemotron",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"norm_eps": "rms_norm_eps"})
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture, max_position=4096, norm_eps=1e-5, partial_rotary=0.5),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            gated=False,
            activation=hf.activation("hidden_act", "relu2"),
        )
