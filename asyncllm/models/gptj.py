"""GPT-J: parallel attention and MLP under one layer norm, neighbouring pairs rotated in a part of each head."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gpt2 import WORDS
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["GPTJ", "GPTJ_WEIGHTS"]


GPTJ_WEIGHTS = WeightMap(
    {
        "transformer.wte": "embed",
        "transformer.h.{i}.ln_1": "layers.{i}.attn_norm",
        "transformer.h.{i}.attn.q_proj": "layers.{i}.attn.qkv[q]",
        "transformer.h.{i}.attn.k_proj": "layers.{i}.attn.qkv[k]",
        "transformer.h.{i}.attn.v_proj": "layers.{i}.attn.qkv[v]",
        "transformer.h.{i}.attn.out_proj": "layers.{i}.attn.out",
        "transformer.h.{i}.mlp.fc_in": "layers.{i}.mlp.up",
        "transformer.h.{i}.mlp.fc_out": "layers.{i}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    ignored=(
        "transformer.h.{i}.attn.bias",
        "transformer.h.{i}.attn.masked_bias",
        "transformer.h.{i}.attn.causal_mask",
        "transformer.h.{i}.attn.embed_positions",
    ),
)


@register(GPTJForCausalLM="GPT-J 6B, GPT4All-J, Dolly 1")
class GPTJ(DecoderLM):
    weights = GPTJ_WEIGHTS
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gptj",
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 96,
        "n_positions": 256,
        "rotary_dim": 8,
        "tie_word_embeddings": False,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        hf.expect("scale_attn_weights", True)
        hf.expect("tie_word_embeddings", False)
        inner = 4 * hf.integer("hidden_size")
        fields = hf.decoder(architecture, norm_eps=1e-5, intermediate_size=inner)
        rotated = hf.integer("rotary_dim", 64, minimum=2, maximum=fields["head_dim"])
        if rotated % 2:
            hf.invalid("rotary_dim", "where rotary embedding needs an even size")
        fields["rope"] = msgspec.structs.replace(fields["rope"], dim=rotated)
        return ModelConfig(
            **fields,
            paired_rotary=True,
            mlp_bias=True,
            head_bias=True,
            parallel_norms=1,
            gated=False,
            activation=hf.activation("activation_function", "gelu_new"),
        )
