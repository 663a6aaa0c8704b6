"""Falcon: one or several KV heads, parallel attention and MLP under one norm or two; RW has sequential branches and
ALiBi."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Falcon"]

WORDS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""Falcon's names of entries -> the usual names."""


@register(
    FalconForCausalLM="Falcon 7B, 40B, 180B, 11B (Falcon 2), RW 1B and 7B", RWForCausalLM="the first files of Falcon"
)
class Falcon(DecoderLM):
    weights = WeightMap(
        {
            "transformer.word_embeddings": "embed",
            "transformer.h.{i}.input_layernorm": "layers.{i}.attn_norm",
            "transformer.h.{i}.ln_attn": "layers.{i}.attn_norm",
            "transformer.h.{i}.ln_mlp": "layers.{i}.mlp_norm",
            "transformer.h.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
            "transformer.h.{i}.self_attention.query_key_value": "layers.{i}.attn.qkv[q+k+v:grouped]",
            "transformer.h.{i}.self_attention.dense": "layers.{i}.attn.out",
            "transformer.h.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up",
            "transformer.h.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down",
            "transformer.ln_f": "norm",
            "lm_head": "head",
        }
    )
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "falcon",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
        "max_position_embeddings": 128,
        "new_decoder_architecture": True,
        "bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        alibi, bias = hf.flag("alibi", False), hf.flag("bias", False)
        # The first files of the 40B model have n_head_kv where later ones have new_decoder_architecture.
        grouped = hf.flag("new_decoder_architecture", "n_head_kv" in hf.fields)
        parallel = hf.flag("parallel_attn", True) or grouped
        shared = not grouped or hf.integer("num_ln_in_parallel_attn", 2, maximum=2) == 1
        hidden_size = hf.integer("hidden_size")
        fields = hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=not alibi, intermediate_size=4 * hidden_size)
        num_heads, head_dim = fields["num_heads"], fields["head_dim"]
        single = 1 if hf.flag("multi_query", True) else num_heads
        fields["num_kv_heads"] = hf.integer("num_kv_heads", num_heads, maximum=num_heads) if grouped else single
        if num_heads % fields["num_kv_heads"]:
            hf.invalid("num_kv_heads", f"which does not divide num_attention_heads = {num_heads}")
        return ModelConfig(
            **fields,
            alibi=alibi_slopes(num_heads, scale=head_dim**-0.5) if alibi else (),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            parallel_norms=(1 if shared else 2) if parallel else None,
            gated=False,
            activation=hf.activation("activation", "gelu"),
        )
