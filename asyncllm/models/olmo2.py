"""OLMo 2: norms only after each branch, and joint norms of all heads' queries and keys."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import PostNormBlock
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["POST_NORM_WEIGHTS", "Olmo2"]

POST_NORM_WEIGHTS = QWEN3_WEIGHTS.without("model.layers.{i}.input_layernorm").replaced(
    {
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attn_post_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }
)


@register(Olmo2ForCausalLM="OLMo 2")
class Olmo2(DecoderLM):
    weights = POST_NORM_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "olmo2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", False)
        return ModelConfig(**hf.decoder(architecture, norm_eps=1e-5), qk_norm="whole")

    def block(self, layer: int) -> PostNormBlock:
        return PostNormBlock(
            attn=self.attention(layer),
            attn_post_norm=self.make_norm(),
            mlp=self.mlp(layer),
            mlp_post_norm=self.make_norm(),
        )
