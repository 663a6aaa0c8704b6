"""Gemma 2: norms around each branch, capped scores and logits, a window in every other layer, scaled embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from torch import nn

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block, SandwichBlock
from asyncllm.layers.embedding import Embedding
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.norm import OffsetRMSNorm, RMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Gemma2"]


class Gemma2Config(ModelConfig, frozen=True, kw_only=True):
    attention_bias: bool
    score_scale: float
    score_softcap: float | None
    logit_softcap: float | None


@register("Gemma2ForCausalLM")
class Gemma2(DecoderLM):
    config: Gemma2Config
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.post_attention_layernorm": "layers.{i}.attn_post_norm",
            "model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm",
            "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gemma2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "query_pre_attn_scalar": 40,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> Gemma2Config:
        hf.expect("hidden_activation", "gelu_pytorch_tanh")
        hf.expect("hidden_act", "gelu_pytorch_tanh")
        hf.expect("use_bidirectional_attention", False)
        fields = hf.decoder(architecture, max_position=8192, head_dim=256, tied=True)
        config = Gemma2Config(
            **fields,
            attention_bias=hf.flag("attention_bias", False),
            score_scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            score_softcap=hf.optional_number("attn_logit_softcapping", 50.0),
            logit_softcap=hf.optional_number("final_logit_softcapping", 30.0),
        )
        window = hf.optional_integer("sliding_window", 4096)
        alternating = [layer % 2 == 0 for layer in range(config.num_layers)]
        return msgspec.structs.replace(config, windows=hf.windows(config.num_layers, window, alternating))

    def embedding(self) -> Embedding:
        return Embedding(self.config.vocab_size, self.config.hidden_size, scale=self.config.hidden_size**0.5)

    def final_norm(self) -> RMSNorm:
        return OffsetRMSNorm(self.config.hidden_size, self.config.rms_eps)

    def output(self, softcap: float | None = None) -> nn.Module:
        return super().output(self.config.logit_softcap)

    def block(self, layer: int) -> Block:
        config = self.config
        return SandwichBlock(
            attn_norm=OffsetRMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                window=config.windows[layer],
                scale=config.score_scale,
                softcap=config.score_softcap,
            ),
            attn_post_norm=OffsetRMSNorm(config.hidden_size, config.rms_eps),
            mlp_norm=OffsetRMSNorm(config.hidden_size, config.rms_eps),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, activation="gelu_tanh"),
            mlp_post_norm=OffsetRMSNorm(config.hidden_size, config.rms_eps),
        )
