"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in the others."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.mamba_hybrid import MAMBA_WEIGHTS, MambaConfig, attention_layers_of, mamba_fields, mamba_layer
from asyncllm.models.registry import register

__all__ = ["Bamba"]

_LAYER = "model.layers.{i}"


@register(BambaForCausalLM="Bamba 9B")
class Bamba(DecoderLM):
    config: MambaConfig
    weights = LLAMA_WEIGHTS.without(
        *(f"{_LAYER}.mlp.{each}_proj" for each in ("gate", "up", "down")),
        f"{_LAYER}.post_attention_layernorm",
        "model.norm",
    ).replaced(
        {
            **MAMBA_WEIGHTS,
            f"{_LAYER}.pre_ff_layernorm": "layers.{i}.mlp_norm",
            f"{_LAYER}.feed_forward.gate_proj": "layers.{i}.mlp.gate_up[gate]",
            f"{_LAYER}.feed_forward.up_proj": "layers.{i}.mlp.gate_up[up]",
            f"{_LAYER}.feed_forward.down_proj": "layers.{i}.mlp.down",
            "model.final_layernorm": "norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "bamba",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attn_layer_indices": [1],
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=262144, norm_eps=1e-5, partial_rotary=0.5)
        attention_layers = attention_layers_of(hf, fields["num_layers"])
        if attention_layers is None:
            attention_layers = _listed(hf, fields["num_layers"])
        bias = hf.flag("attention_bias", False)
        return MambaConfig(
            **fields,
            **mamba_fields(hf, fields["hidden_size"]),
            attention_layers=attention_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
        )

    def attention(self, layer: int) -> AnyAttention:
        return super().attention(layer) if layer in self.config.attention_layers else mamba_layer(self.config, layer)


def _listed(hf: HFConfig, num_layers: int) -> frozenset[int]:
    layers = hf.fields.get("attn_layer_indices") or []
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        hf.invalid("attn_layer_indices", f"where a list of layers below {num_layers} belongs")
    return frozenset(layers)
