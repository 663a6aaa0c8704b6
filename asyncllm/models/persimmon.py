"""Persimmon: squared ReLU, layer norms, including norms of each head's queries and keys, half of each head rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Persimmon"]


@register(PersimmonForCausalLM="Persimmon 8B")
class Persimmon(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.self_attn.query_key_value": "layers.{i}.attn.qkv[q+k+v:grouped]",
            "model.layers.{i}.self_attn.q_layernorm": "layers.{i}.attn.q_norm",
            "model.layers.{i}.self_attn.k_layernorm": "layers.{i}.attn.k_norm",
            "model.layers.{i}.self_attn.dense": "layers.{i}.attn.out",
            "model.layers.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up",
            "model.layers.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down",
            "model.final_layernorm": "norm",
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "persimmon",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"layer_norm_eps": "rms_norm_eps"})
        return ModelConfig(
            **hf.decoder(architecture, max_position=16384, norm_eps=1e-5, partial_rotary=0.5),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            qk_norm="head" if hf.flag("qk_layernorm", True) else None,
            gated=False,
            activation=hf.activation("hidden_act", "relu2"),
        )
