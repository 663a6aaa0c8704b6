"""GPT-NeoX and Pythia: parallel attention and MLP with a norm each, a quarter of each head rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["GPTNeoX"]

WORDS = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
"""GPT-NeoX's names of entries -> the usual names."""


@register(GPTNeoXForCausalLM="GPT-NeoX-20B, Pythia, Dolly, RedPajama-INCITE")
class GPTNeoX(DecoderLM):
    weights = WeightMap(
        {
            "gpt_neox.embed_in": "embed",
            "gpt_neox.layers.{i}.input_layernorm": "layers.{i}.attn_norm",
            "gpt_neox.layers.{i}.attention.query_key_value": "layers.{i}.attn.qkv[q+k+v:grouped]",
            "gpt_neox.layers.{i}.attention.dense": "layers.{i}.attn.out",
            "gpt_neox.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
            "gpt_neox.layers.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up",
            "gpt_neox.layers.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down",
            "gpt_neox.final_layer_norm": "norm",
            "embed_out": "head",
            "lm_head": "head",
        },
        ignored=("gpt_neox.layers.{i}.attention.bias", "gpt_neox.layers.{i}.attention.masked_bias"),
    )
    base_prefix = "gpt_neox."
    head_name = "embed_out.weight"
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gpt_neox",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rotary_pct": 0.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        bias = hf.flag("attention_bias", True)
        return ModelConfig(
            **hf.decoder(architecture, norm_eps=1e-5, partial_rotary=0.25),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            parallel_norms=2 if hf.flag("use_parallel_residual", True) else None,
            gated=False,
            activation=hf.activation("hidden_act", "gelu"),
        )
