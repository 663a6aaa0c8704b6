"""nanochat: norms without weights, of the embeddings too, and of queries and keys after their rotation, which turns in
the opposite direction."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.attention import Attention
from asyncllm.layers.swapped_qkv import SwappedQKVLinear
from asyncllm.layers.unit_norm import UnitStreamNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["NanoChat"]


@register(NanoChatForCausalLM="nanochat d20, d32")
class NanoChat(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {"model.layers.{i}.mlp.fc1": "layers.{i}.mlp.up", "model.layers.{i}.mlp.fc2": "layers.{i}.mlp.down"}
    )
    norm_class = UnitStreamNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "nanochat",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture),
            qkv_bias=bias,
            out_bias=bias,
            gated=False,
            activation=hf.activation("hidden_act", "relu2"),
            qk_norm="rotated",
            embedding_norm=True,
            logit_softcap=hf.optional_number("final_logit_softcapping", 15.0),
        )

    def attention(self, layer: int) -> Attention:
        heads, config = self.attention_config(layer), self.config
        attention = Attention(layer, config.hidden_size, heads)
        attention.qkv = SwappedQKVLinear(
            config.hidden_size, heads.num_heads, heads.num_kv_heads, heads.head_dim, bias=heads.qkv_bias
        )
        return attention
