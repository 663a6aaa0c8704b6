"""OLMo Hybrid: gated delta nets with pre-norms and, in every fourth layer, OLMo 3's attention with post-norms."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention, AnyBlock, Block, PostNormBlock
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.olmo2 import POST_NORM_WEIGHTS
from asyncllm.models.qwen3_next import Qwen3NextConfig, delta_fields, delta_net
from asyncllm.models.registry import register
from asyncllm.models.rope import rope_fields
from asyncllm.models.weights import WeightMap

__all__ = ["OlmoHybrid"]

_LAYER = "model.layers.{i}"
_LINEAR = f"{_LAYER}.linear_attn"

_NORM_EPS = 1e-5
"""Epsilon of the norms of delta nets' heads, regardless of rms_norm_eps."""


class OlmoHybridConfig(Qwen3NextConfig, frozen=True, kw_only=True):
    top_weight: float
    """See `GatedDeltaNet`."""


@register(OlmoHybridForCausalLM="OLMo Hybrid 7B")
class OlmoHybrid(DecoderLM):
    config: OlmoHybridConfig
    weights = POST_NORM_WEIGHTS.replaced(
        {
            f"{_LAYER}.attention_layer_norm": "layers.{i}.attn_norm",
            f"{_LAYER}.feedforward_layer_norm": "layers.{i}.mlp_norm",
            **{f"{_LINEAR}.{each}_proj": f"layers.{{i}}.attn.inputs[{each}]" for each in "qkv"},
            **{f"{_LINEAR}.{each}_conv1d": f"layers.{{i}}.attn.conv[{each}]" for each in "qkv"},
            f"{_LINEAR}.g_proj": "layers.{i}.attn.inputs[gate]",
            f"{_LINEAR}.a_proj": "layers.{i}.attn.weights[step]",
            f"{_LINEAR}.b_proj": "layers.{i}.attn.weights[beta]",
            f"{_LINEAR}.A_log": "layers.{i}.attn.decay:log_rate",
            f"{_LINEAR}.dt_bias": "layers.{i}.attn.decay:step_bias",
            f"{_LINEAR}.o_norm": "layers.{i}.attn.norm",
            f"{_LINEAR}.o_proj": "layers.{i}.attn.out",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "olmo_hybrid",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 12,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", False)
        # Published files have null for the entries, or for what is in them: no layer uses positions.
        rope = rope_fields(hf)
        rotary = any(each.fields.get("rope_theta") is not None for each in (hf, rope))
        if not rotary:
            rope.expect("rope_type", "default")
            rope.expect("type", "default")
        fields = hf.decoder(architecture, max_position=65536, rotary=rotary)
        heads = hf.integer("linear_num_key_heads", fields["num_heads"])
        keys = hf.integer("linear_key_head_dim", max(int(0.75 * fields["hidden_size"] / heads), 1))
        absent = {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": hf.integer("linear_num_value_heads", fields["num_heads"]),
            "linear_key_head_dim": keys,
            "linear_value_head_dim": hf.integer("linear_value_head_dim", 2 * keys),
        }
        return OlmoHybridConfig(
            **fields,
            **{**delta_fields(hf.changed(absent), fields["num_layers"]), "qk_norm": "whole"},
            top_weight=2.0 if hf.flag("linear_allow_neg_eigval", True) else 1.0,
        )

    @property
    def weight_map(self) -> WeightMap:
        # transformers writes the first norm of layers with attention under the name of the others' second norm.
        layers = (f"layers.{layer}" for layer in self.config.attention_layers)
        return super().weight_map.replaced(
            {f"model.{layer}.feedforward_layer_norm": f"{layer}.attn_post_norm" for layer in layers}
        )

    def block(self, layer: int) -> AnyBlock:
        attn, mlp = self.attention(layer), self.mlp(layer)
        norms = self.make_norm(), self.make_norm()
        if layer in self.config.attention_layers:
            return PostNormBlock(attn=attn, attn_post_norm=norms[0], mlp=mlp, mlp_post_norm=norms[1])
        return Block(attn_norm=norms[0], attn=attn, mlp_norm=norms[1], mlp=mlp)

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return super().attention(layer)
        return delta_net(layer, config, norm_eps=_NORM_EPS, top_weight=config.top_weight, parted_conv=True)
