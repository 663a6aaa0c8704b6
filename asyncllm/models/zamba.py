"""Zamba: Mamba with heads in every layer, and in front of some of them a transformer block that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncllm.layers.per_head_mamba import PerHeadMamba
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.jamba import JAMBA_SCAN
from asyncllm.models.mamba import ScanConfig, scan_fields
from asyncllm.models.registry import register
from asyncllm.models.shared_block_model import SharedBlockLM, block_weights, hybrid_layers

__all__ = ["Zamba", "ZambaConfig"]

_MAMBA = "model.layers.{i}.mamba"

_STATE = {
    f"{_MAMBA}.in_proj": "layers.{i}.attn.inputs",
    f"{_MAMBA}.conv1d": "layers.{i}.attn.conv",
    f"{_MAMBA}.x_proj_weight": "layers.{i}.attn.heads:maps",
    f"{_MAMBA}.dt_proj_weight": "layers.{i}.attn.heads:steps",
    f"{_MAMBA}.dt_proj_bias": "layers.{i}.attn.heads:step_bias",
    f"{_MAMBA}.A_log": "layers.{i}.attn.states:log_rate",
    f"{_MAMBA}.D": "layers.{i}.attn.states:skip",
    f"{_MAMBA}.out_proj": "layers.{i}.attn.out",
}


class ZambaConfig(ScanConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with the shared block."""
    mamba_size: int
    """Number of features with a state."""
    mamba_heads: int
    """Number of heads that they belong to."""


@register(ZambaForCausalLM="Zamba 7B")
class Zamba(SharedBlockLM):
    config: ZambaConfig
    block_name = "shared_transf"
    weights = block_weights(block_name, _STATE, {"gate_proj": "[gate]", "up_proj": "[up]"})
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "zamba",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_head_dim": 12,
        "max_position_embeddings": 128,
        "n_mamba_heads": 2,
        "mamba_d_state": 12,
        "mamba_dt_rank": 6,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
        "rms_norm_eps": 1e-3,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_mamba_act", "silu")
        hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads", 16, maximum=2**16)
        hf.expect("attention_hidden_size", 2 * hidden_size)
        usual = {"num_attention_heads": num_heads, "num_key_value_heads": hf.integer("num_key_value_heads", 16)}
        fields = (
            hf.named({"attention_head_dim": "head_dim"})
            .changed(usual)
            .decoder(
                architecture,
                max_position=4096,
                norm_eps=1e-5,
                tied=True,
                rotary=False,
                head_dim=2 * hidden_size // num_heads,
            )
        )
        inner, heads = hf.integer("mamba_expand", 2) * hidden_size, hf.integer("n_mamba_heads", 2)
        if inner % heads:
            hf.invalid("n_mamba_heads", f"which does not divide mamba_expand x hidden_size = {inner}")
        return ZambaConfig(
            **fields,
            **scan_fields(hf.named(JAMBA_SCAN), hidden_size),
            attention_layers=hybrid_layers(_with_kinds(hf, fields["num_layers"]), fields["num_layers"]),
            score_scale=(fields["head_dim"] / 2) ** -0.5,
            activation=hf.activation("hidden_act", "gelu"),
            mamba_size=inner,
            mamba_heads=heads,
        )

    @property
    def uses(self) -> Sequence[int]:
        return sorted(self.config.attention_layers)

    def state(self, place: int) -> PerHeadMamba:
        config = self.config
        return PerHeadMamba(
            place,
            config.hidden_size,
            num_heads=config.mamba_heads,
            inner_size=config.mamba_size,
            state_size=config.state_size,
            step_rank=config.step_rank,
            conv_length=config.conv_length,
            conv_bias=config.conv_bias,
            bias=config.scan_bias,
        )


def _with_kinds(hf: HFConfig, num_layers: int) -> HFConfig:
    """Return the file with kinds of layers, which follow from two numbers if it lists none. Raises
    InvalidCheckpoint."""
    if any(hf.fields.get(key) is not None for key in ("layer_types", "layers_block_type")):
        return hf
    period, offset = hf.integer("attn_layer_period", 6), hf.integer("attn_layer_offset", 4, minimum=0)
    later = ["hybrid" if layer % period == offset else "mamba" for layer in range(num_layers)]
    return hf.changed({"layers_block_type": ["mamba", "mamba", "hybrid", *later][:num_layers]})
