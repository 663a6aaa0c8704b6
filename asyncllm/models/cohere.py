"""Command R: parallel attention and MLP under one layer norm without bias, scaled logits, rotation of neighbouring
pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Cohere"]


@register(CohereForCausalLM="Command R, R+, Aya 23, Aya Expanse")
class Cohere(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.self_attn.q_norm": "layers.{i}.attn.q_norm",
            "model.layers.{i}.self_attn.k_norm": "layers.{i}.attn.k_norm",
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "cohere",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "use_qk_norm": True,
        "logit_scale": 0.3,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        # In Command R, max_position_embeddings = 8192 is a buffer size of its own code, and model_max_length is the
        # context.
        hf = hf.named({"layer_norm_eps": "rms_norm_eps", "model_max_length": "max_position_embeddings"})
        hf.expect("hidden_act", "silu")
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture, max_position=8192, theta=500000.0, norm_eps=1e-5, tied=True),
            qkv_bias=bias,
            out_bias=bias,
            norm_bias=False,
            qk_norm="heads" if hf.flag("use_qk_norm", False) else None,
            parallel_norms=1,
            paired_rotary=True,
            logit_scale=hf.number("logit_scale", 0.0625),
        )
