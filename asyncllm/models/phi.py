"""Phi-1, 1.5 and 2: parallel attention and MLP under one norm, biases everywhere, a part of each head rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Phi"]


@register(PhiForCausalLM="Phi-1, Phi-1.5, Phi-2")
class Phi(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.self_attn.q_layernorm": "layers.{i}.attn.q_norm",
            "model.layers.{i}.self_attn.k_layernorm": "layers.{i}.attn.k_norm",
            "model.layers.{i}.self_attn.dense": "layers.{i}.attn.out",
            "model.layers.{i}.mlp.fc1": "layers.{i}.mlp.up",
            "model.layers.{i}.mlp.fc2": "layers.{i}.mlp.down",
            "model.final_layernorm": "norm",
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "phi",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        if hf.fields.get("model_type") == "phi-msft":
            hf.unsupported("model_type", "Its authors have renamed the files: take those whose model_type is 'phi'.")
        hf = hf.named({"layer_norm_eps": "rms_norm_eps"})
        hf.expect("tie_word_embeddings", False)
        return ModelConfig(
            **hf.decoder(architecture, norm_eps=1e-5, partial_rotary=0.5),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_bias=True,
            qk_norm="head" if hf.flag("qk_layernorm", False) else None,
            parallel_norms=1,
            gated=False,
            activation=hf.activation("hidden_act", "gelu_new"),
        )
