"""Apertus: a plain MLP with xIELU, and norms of each head's queries and keys."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from asyncllm.layers.xielu import XIELUMLP
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Apertus"]

_LAYER = "model.layers.{i}"


@register(ApertusForCausalLM="Apertus 8B, 70B")
class Apertus(DecoderLM):
    # The bound of xIELU's exponent is -1e-6 in all files: it avoids a division in training, and changes no result.
    weights = (
        LLAMA_WEIGHTS.without(f"{_LAYER}.mlp.gate_proj")
        .replaced(
            {
                f"{_LAYER}.attention_layernorm": "layers.{i}.attn_norm",
                f"{_LAYER}.feedforward_layernorm": "layers.{i}.mlp_norm",
                f"{_LAYER}.self_attn.q_norm": "layers.{i}.attn.q_norm",
                f"{_LAYER}.self_attn.k_norm": "layers.{i}.attn.k_norm",
                f"{_LAYER}.mlp.up_proj": "layers.{i}.mlp.up",
                f"{_LAYER}.mlp.act_fn": "layers.{i}.mlp.act",
            }
        )
        .ignoring(f"{_LAYER}.mlp.act_fn.eps")
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "apertus",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "hidden_act": "xielu",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "xielu")
        hf.expect("mlp_bias", False)
        hf = hf.with_llama3_rope(8.0)
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture, max_position=65536, theta=12e6, norm_eps=1e-5),
            qkv_bias=bias,
            out_bias=bias,
            gated=False,
            qk_norm="head",
        )

    def mlp(self, layer: int) -> nn.Module:
        return XIELUMLP(self.config.hidden_size, self.config.intermediate_size)
