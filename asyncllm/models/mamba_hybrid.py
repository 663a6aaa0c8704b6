"""Common parts of decoders that mix layers of Mamba-2 and attention."""

from __future__ import annotations

import math
from typing import Any

from asyncllm.layers.mamba2 import Mamba2
from asyncllm.models.config import HFConfig, ModelConfig

__all__ = ["MAMBA_WEIGHTS", "MambaConfig", "attention_layers_of", "mamba_fields", "mamba_layer", "mamba_sizes"]

_MAMBA = "model.layers.{i}.mamba"

MAMBA_WEIGHTS = {
    f"{_MAMBA}.in_proj": "layers.{i}.attn.inputs",
    f"{_MAMBA}.conv1d": "layers.{i}.attn.conv",
    f"{_MAMBA}.A_log": "layers.{i}.attn.space:log_rate",
    f"{_MAMBA}.dt_bias": "layers.{i}.attn.space:step_bias",
    f"{_MAMBA}.D": "layers.{i}.attn.space:skip",
    f"{_MAMBA}.norm": "layers.{i}.attn.norm",
    f"{_MAMBA}.out_proj": "layers.{i}.attn.out",
}
"""Rows of a weight table for Mamba-2 layers."""

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
"""Names of layer kinds in config.json, before transformers 5 and since."""


class MambaConfig(ModelConfig, frozen=True, kw_only=True):
    """The config of a decoder with layers of Mamba-2 and of attention."""

    attention_layers: frozenset[int]
    """The layers with attention."""
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    """Number of groups of heads that share the vectors that write and read their states."""
    mamba_state: int
    """Numbers in the state of each feature."""
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""
    conv_bias: bool
    mamba_bias: bool
    """Whether the products around the state space have a bias."""


def mamba_fields(hf: HFConfig, hidden_size: int, inner: int | None = None) -> dict[str, Any]:
    """Return the MambaConfig fields for Mamba-2 layers. `inner`: number of features with a state, if not mamba_expand x
    `hidden_size`. Raises InvalidCheckpoint, UnsupportedModel."""
    if _limits(hf.fields.get("time_step_limit")) not in (None, (0.0, math.inf)):
        hf.unsupported("time_step_limit", "Steps of any size above 0 are.")
    heads, groups = hf.integer("mamba_n_heads", 128), hf.integer("mamba_n_groups", 1)
    inner = inner or hf.integer("mamba_expand", 2) * hidden_size
    head_dim = inner // heads if hf.fields.get("mamba_d_head", "auto") == "auto" else hf.integer("mamba_d_head")
    if heads * head_dim != inner:
        hf.invalid("mamba_d_head", f"of which {heads} heads are not the {inner} features that states follow")
    if heads % groups:
        hf.invalid("mamba_n_groups", f"which does not divide mamba_n_heads = {heads}")
    return {
        "mamba_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_groups": groups,
        "mamba_state": hf.integer("mamba_d_state", 256),
        "conv_length": hf.integer("mamba_d_conv", 4, minimum=2, maximum=16),
        "conv_bias": hf.flag("mamba_conv_bias", True),
        "mamba_bias": hf.flag("mamba_proj_bias", False),
    }


def mamba_layer(config: MambaConfig, layer: int, *, min_step: float = 0.0) -> Mamba2:
    """Return the Mamba-2 of layer `layer`, with step sizes of at least `min_step`."""
    return Mamba2(layer, config.hidden_size, **mamba_sizes(config), min_step=min_step)


def mamba_sizes(config: MambaConfig) -> dict[str, Any]:
    """Return the arguments of `Mamba2` that are the same for all layers of a model."""
    return {
        "num_heads": config.mamba_heads,
        "head_dim": config.mamba_head_dim,
        "num_groups": config.mamba_groups,
        "state_size": config.mamba_state,
        "conv_length": config.conv_length,
        "conv_bias": config.conv_bias,
        "bias": config.mamba_bias,
        "norm_eps": config.norm_eps,
    }


def attention_layers_of(hf: HFConfig, num_layers: int) -> frozenset[int] | None:
    """Return the layers with attention, or None if config.json does not list layer kinds. Raises InvalidCheckpoint,
    UnsupportedModel."""
    key = "layer_types" if hf.fields.get("layer_types") is not None else "layers_block_type"
    kinds = hf.fields.get(key)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        hf.invalid(key, f"where a list of {num_layers} layer kinds belongs")
    if not set(map(str, kinds)) <= _KINDS.keys():
        hf.unsupported(key, f"Supported: {', '.join(map(repr, _KINDS))}.")
    return frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind] == "attention")


def _limits(value: Any) -> Any:
    """Return a pair of numbers; transformers writes the infinity that JSON lacks as {"__float__": "Infinity"}."""
    if not isinstance(value, list):
        return value
    return tuple(math.inf if each == {"__float__": "Infinity"} else each for each in value)
