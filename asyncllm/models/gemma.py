"""Gemma: Llama with scaled embeddings, norms that store weight - 1, and GELU in the gate."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Gemma"]


@register(GemmaForCausalLM="Gemma 2B, 7B, CodeGemma")
class Gemma(DecoderLM):
    weights = LLAMA_WEIGHTS
    norm_class = OffsetRMSNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gemma",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "max_position_embeddings": 128,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        # The first files say "gelu", but the released weights were trained with the tanh approximation.
        for key in ("hidden_act", "hidden_activation"):
            hf.expect(key, "gelu_pytorch_tanh", "gelu")
        hf.expect("use_bidirectional_attention", False)
        fields = hf.decoder(architecture, max_position=8192, head_dim=256, tied=True)
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **fields,
            qkv_bias=bias,
            out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=fields["hidden_size"] ** 0.5,
        )
