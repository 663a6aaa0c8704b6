"""LFM3: LFM2's convolutions and attention, with windows, a gate for each head, and norms around each branch."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm import kernels
from asyncllm.layers.block import AnyAttention, Block, SandwichBlock
from asyncllm.layers.gated_attention import HeadGatedAttention
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.lfm2 import Lfm2, Lfm2Config
from asyncllm.models.registry import register
from asyncllm.models.rope import rope_fields

__all__ = ["Lfm3"]

_LAYER, _ATTENTION = "model.layers.{i}", "model.layers.{i}.self_attn"
_KINDS = ("conv", "sliding_attention", "full_attention")
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


class Lfm3Config(Lfm2Config, frozen=True, kw_only=True):
    sandwich: bool
    """Whether norms also follow each branch."""
    gated_heads: bool


@register(Lfm3ForCausalLM="LFM3 1.7B")
class Lfm3(Lfm2):
    config: Lfm3Config
    weights = Lfm2.weights.replaced(
        {
            f"{_ATTENTION}.o_proj": "layers.{i}.attn.out",
            f"{_ATTENTION}.q_norm": "layers.{i}.attn.q_norm",
            f"{_ATTENTION}.k_norm": "layers.{i}.attn.k_norm",
            f"{_ATTENTION}.gate_proj": "layers.{i}.attn.gate",
            f"{_ATTENTION}.g_proj": "layers.{i}.attn.gate",
            f"{_LAYER}.post_operator_norm": "layers.{i}.attn_post_norm",
            f"{_LAYER}.post_ffn_norm": "layers.{i}.mlp_post_norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "lfm3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "conv_L_cache": 7,
        "conv_bias": True,
        "attention_bias": True,
        "sliding_window": 8,
        "rope_parameters": {**_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"})
        hf = hf.changed({"rope_parameters": hf.fields.get("rope_parameters") or _ROPES})

        def read(kind: str) -> dict[str, Any]:
            own = hf.of_layers(kind)
            part = 1.0 if rope_fields(own).fields.get("rope_type") == "proportional" else None
            return own.decoder(
                architecture, max_position=128000, head_dim=128, norm_eps=1e-5, tied=True, partial_rotary=part
            )

        fields, sliding = read("full_attention"), read("sliding_attention")
        usual = [
            "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer else "conv"
            for layer in range(fields["num_layers"])
        ]
        kinds = hf.layer_kinds(fields["num_layers"], _KINDS, usual)
        window = hf.integer("sliding_window", 256)
        fields["windows"] = tuple(window if kind == "sliding_attention" else None for kind in kinds)
        bias = hf.flag("attention_bias", False)
        return Lfm3Config(
            **fields,
            layer_ropes=tuple((fields if window is None else sliding)["rope"] for window in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            conv_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
            conv_length=hf.integer("conv_L_cache", 7, minimum=2, maximum=16),
            conv_bias=hf.flag("conv_bias", False),
            sandwich=hf.flag("use_sandwich_norm", True),
            gated_heads=hf.flag("use_attention_gate", True),
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.conv_layers or not config.gated_heads:
            return super().attention(layer)
        heads = self.attention_config(layer)
        return HeadGatedAttention(layer, config.hidden_size, heads, activation=kernels.sigmoid)

    def block(self, layer: int) -> Block:
        return SandwichBlock(**self.sandwich_parts(layer)) if self.config.sandwich else Block(**self.block_parts(layer))
