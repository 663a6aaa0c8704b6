"""Gemma 2: norms around each branch, capped scores and logits, a window in every other layer, scaled embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import SandwichBlock
from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Gemma2"]


@register(Gemma2ForCausalLM="Gemma 2 2B, 9B, 27B")
class Gemma2(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.post_attention_layernorm": "layers.{i}.attn_post_norm",
            "model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm",
            "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
        }
    )
    norm_class = OffsetRMSNorm
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
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_activation", "gelu_pytorch_tanh")
        # Released files say "gelu" here, but mean the approximation that hidden_activation names.
        hf.expect("hidden_act", "gelu_pytorch_tanh", "gelu")
        hf.expect("use_bidirectional_attention", False)
        fields = hf.decoder(architecture, max_position=8192, head_dim=256, tied=True)
        bias, num_layers = hf.flag("attention_bias", False), fields["num_layers"]
        window = hf.optional_integer("sliding_window", 4096)
        fields["windows"] = hf.windows(num_layers, window, [layer % 2 == 0 for layer in range(num_layers)])
        return ModelConfig(
            **fields,
            qkv_bias=bias,
            out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=fields["hidden_size"] ** 0.5,
            score_scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            score_softcap=hf.optional_number("attn_logit_softcapping", 50.0),
            logit_softcap=hf.optional_number("final_logit_softcapping", 30.0),
        )

    def block(self, layer: int) -> SandwichBlock:
        return SandwichBlock(**self.sandwich_parts(layer))
