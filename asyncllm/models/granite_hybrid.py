"""Granite 4: Mamba-2 in most layers, attention in the others, Granite's multipliers, and a shared MLP beside experts,
or alone."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.mamba2 import Mamba2
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.granite import Granite
from asyncllm.models.granite_moe import GraniteMoE
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["GraniteHybrid"]

_MAMBA = "model.layers.{i}.mamba"

_DENSE = {
    "model.layers.{i}.shared_mlp.input_linear": "layers.{i}.mlp.gate_up[gate+up]",
    "model.layers.{i}.shared_mlp.output_linear": "layers.{i}.mlp.down",
}

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
"""Names in config.json, before transformers 5 and since."""


class GraniteHybridConfig(ModelConfig, frozen=True, kw_only=True):
    attending: frozenset[int]
    """Layers with attention."""
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    """Of heads that share what writes and reads their states."""
    mamba_state: int
    """Numbers of the state for each feature."""
    conv_length: int
    """How many tokens a convolution sees, the newest included."""
    conv_bias: bool
    mamba_bias: bool
    """Of the products around it."""


@register(GraniteMoeHybridForCausalLM="Granite 4.0 Micro, Tiny, Small")
class GraniteHybrid(GraniteMoE):
    config: GraniteHybridConfig
    weights = GraniteMoE.weights.replaced(
        {
            f"{_MAMBA}.in_proj": "layers.{i}.attn.inputs",
            f"{_MAMBA}.conv1d": "layers.{i}.attn.conv",
            f"{_MAMBA}.A_log": "layers.{i}.attn.space:log_rate",
            f"{_MAMBA}.dt_bias": "layers.{i}.attn.space:step_bias",
            f"{_MAMBA}.D": "layers.{i}.attn.space:skip",
            f"{_MAMBA}.norm": "layers.{i}.attn.norm",
            f"{_MAMBA}.out_proj": "layers.{i}.attn.out",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **Granite.tiny,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
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
    def configure(hf: HFConfig, architecture: str) -> GraniteHybridConfig:
        experts = hf.integer("num_local_experts", 8, minimum=0) > 0
        shared_size = hf.integer("shared_intermediate_size", 1024)
        if not experts:
            hf = hf.changed({"intermediate_size": shared_size})
        base = GraniteMoE.configure(hf, architecture) if experts else Granite.configure(hf, architecture)
        hf.expect("position_embedding_type", "rope", "nope")
        turns = hf.fields.get("position_embedding_type") == "rope"
        if not turns and hf.rope_scaling_factor:
            hf.unsupported("position_embedding_type", "There are no rotary positions to scale: rope_scaling_factor=0.")
        if _limits(hf.fields.get("time_step_limit")) not in (None, (0.0, math.inf)):
            hf.unsupported("time_step_limit", "Steps of any size above 0 are.")
        heads, groups = hf.integer("mamba_n_heads", 128), hf.integer("mamba_n_groups", 1)
        inner = hf.integer("mamba_expand", 2) * base.hidden_size
        head_dim = inner // heads if hf.fields.get("mamba_d_head", "auto") == "auto" else hf.integer("mamba_d_head")
        if heads * head_dim != inner:
            hf.invalid("mamba_d_head", f"of which {heads} heads are not mamba_expand x hidden_size = {inner}")
        if heads % groups:
            hf.invalid("mamba_n_groups", f"which does not divide mamba_n_heads = {heads}")
        fields = msgspec.structs.asdict(base)
        if not turns:
            fields["rope"] = None
        return GraniteHybridConfig(
            **fields,
            attending=_attending(hf, base.num_layers),
            mamba_heads=heads,
            mamba_head_dim=head_dim,
            mamba_groups=groups,
            mamba_state=hf.integer("mamba_d_state", 256),
            conv_length=hf.integer("mamba_d_conv", 4, minimum=2, maximum=16),
            conv_bias=hf.flag("mamba_conv_bias", True),
            mamba_bias=hf.flag("mamba_proj_bias", False),
        )

    @property
    def weight_map(self) -> WeightMap:
        table = super().weight_map
        return table if self.config.experts is not None else table.replaced(_DENSE)

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attending:
            return super().attention(layer)
        return Mamba2(
            layer,
            config.hidden_size,
            num_heads=config.mamba_heads,
            head_dim=config.mamba_head_dim,
            num_groups=config.mamba_groups,
            state_size=config.mamba_state,
            conv_length=config.conv_length,
            conv_bias=config.conv_bias,
            bias=config.mamba_bias,
            norm_eps=config.norm_eps,
        )


def _attending(hf: HFConfig, num_layers: int) -> frozenset[int]:
    key = "layer_types" if hf.fields.get("layer_types") is not None else "layers_block_type"
    kinds = hf.fields.get(key) or ["mamba"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        hf.invalid(key, f"where a list of {num_layers} layer kinds belongs")
    if not set(map(str, kinds)) <= _KINDS.keys():
        hf.unsupported(key, f"Supported: {', '.join(map(repr, _KINDS))}.")
    return frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind] == "attention")


def _limits(value: Any) -> Any:
    """A pair of numbers, of which transformers writes what JSON lacks as {"__float__": "Infinity"}."""
    if not isinstance(value, list):
        return value
    return tuple(
        float(each["__float__"]) if isinstance(each, dict) and isinstance(each.get("__float__"), str) else each
        for each in value
    )
