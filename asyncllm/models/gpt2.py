"""GPT-2: learned positions, layer norms, a plain MLP, and weights stored transposed."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["GPT2", "GPT2_WEIGHTS", "WORDS"]


WORDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""GPT-2's names of entries -> the usual names."""

GPT2_WEIGHTS = WeightMap(
    {
        "transformer.wte": "embed",
        "transformer.wpe": "positions",
        "transformer.h.{i}.ln_1": "layers.{i}.attn_norm",
        "transformer.h.{i}.attn.c_attn": "layers.{i}.attn.qkv[q+k+v:grouped]",
        "transformer.h.{i}.attn.c_proj": "layers.{i}.attn.out",
        "transformer.h.{i}.ln_2": "layers.{i}.mlp_norm",
        "transformer.h.{i}.mlp.c_fc": "layers.{i}.mlp.up",
        "transformer.h.{i}.mlp.c_proj": "layers.{i}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    ignored=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)


@register(GPT2LMHeadModel="GPT-2, DistilGPT-2, DialoGPT")
class GPT2(DecoderLM):
    weights = GPT2_WEIGHTS.replaced(
        {
            "transformer.h.{i}.attn.c_attn": "layers.{i}.attn.qkv[q+k+v:transposed]",
            "transformer.h.{i}.attn.c_proj": "layers.{i}.attn.out[:transposed]",
            "transformer.h.{i}.mlp.c_fc": "layers.{i}.mlp.up[:transposed]",
            "transformer.h.{i}.mlp.c_proj": "layers.{i}.mlp.down[:transposed]",
        }
    )
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gpt2",
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 96,
        "n_positions": 256,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        hf.expect("scale_attn_weights", True)
        hf.expect("scale_attn_by_inverse_layer_idx", False)
        hf.expect("add_cross_attention", False)
        inner = 4 * hf.integer("hidden_size")
        fields = hf.decoder(
            architecture, max_position=1024, norm_eps=1e-5, tied=True, rotary=False, intermediate_size=inner
        )
        return ModelConfig(
            **fields,
            position_offset=0,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            gated=False,
            activation=hf.activation("activation_function", "gelu_new"),
        )
