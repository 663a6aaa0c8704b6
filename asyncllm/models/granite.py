"""Granite 3, and MiniCPM 1 and 2: Llama with constants that multiply embeddings, branches, scores and logits."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Granite", "MiniCPM"]


@register(GraniteForCausalLM="Granite 3, dense")
class Granite(DecoderLM):
    weights = LLAMA_WEIGHTS
    scales_images = True
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "granite",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 5.0,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            embedding_scale=hf.number("embedding_multiplier", 1.0),
            branch_scale=hf.number("residual_multiplier", 1.0),
            score_scale=hf.number("attention_multiplier", 1.0),
            logit_scale=1 / hf.number("logits_scaling", 1.0),
        )


@register(MiniCPMForCausalLM="MiniCPM 1B, 2B, MiniCPM4")
class MiniCPM(Granite):
    scales_images = False

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("num_experts", 0)
        hf.expect("use_output_gate", False)
        fields = hf.decoder(architecture, tied=True)
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **fields,
            qkv_bias=bias,
            out_bias=bias,
            embedding_scale=hf.number("scale_emb", 1.0),
            branch_scale=hf.number("scale_depth", 1.0) / fields["num_layers"] ** 0.5,
            logit_scale=hf.number("dim_model_base", 1.0) / fields["hidden_size"],
        )
