"""BLOOM: ALiBi, a norm of the embeddings, layer norms, a plain MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Bloom"]


WORDS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""BLOOM's names of entries -> the usual names."""


@register(BloomForCausalLM="BLOOM 560M to 176B, BLOOMZ")
class Bloom(DecoderLM):
    weights = WeightMap(
        {
            "transformer.word_embeddings": "embed",
            "transformer.word_embeddings_layernorm": "embed_norm",
            "transformer.h.{i}.input_layernorm": "layers.{i}.attn_norm",
            "transformer.h.{i}.self_attention.query_key_value": "layers.{i}.attn.qkv[q+k+v:grouped]",
            "transformer.h.{i}.self_attention.dense": "layers.{i}.attn.out",
            "transformer.h.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
            "transformer.h.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up",
            "transformer.h.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down",
            "transformer.ln_f": "norm",
            "lm_head": "head",
        }
    )
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "bloom",
        "vocab_size": 320,
        "hidden_size": 96,
        "n_layer": 2,
        "n_head": 6,
        "seq_length": 256,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        hf.expect("apply_residual_connection_post_layernorm", False)
        inner = 4 * hf.integer("hidden_size")
        fields = hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=False, intermediate_size=inner)
        return ModelConfig(
            **fields,
            alibi=alibi_slopes(fields["num_heads"]),
            embedding_norm=True,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            gated=False,
            activation="gelu_tanh",
        )
