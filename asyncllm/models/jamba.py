"""Jamba: Mamba in most layers, attention without positions in the others, and experts in every other layer."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.block import AnyAttention
from asyncllm.layers.norm import RMSNorm
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import expert_rows, stacked_rows
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.mamba import ScanConfig, scan_fields, scan_layer
from asyncllm.models.registry import register

__all__ = ["JAMBA_SCAN", "Jamba"]

_LAYER = "model.layers.{i}"
_MAMBA = f"{_LAYER}.mamba"
_MLP = f"{_LAYER}.feed_forward"

JAMBA_SCAN = {
    "mamba_d_state": "state_size",
    "mamba_dt_rank": "time_step_rank",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
"""Jamba's names of entries -> Mamba's."""


class JambaConfig(ScanConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with attention."""
    mamba_size: int
    """Number of features with a state in the other layers."""


@register(JambaForCausalLM="Jamba v0.1, 1.5 and 1.6 Mini and Large, Jamba Reasoning 3B")
class Jamba(DecoderLM):
    config: JambaConfig
    weights = LLAMA_WEIGHTS.without(
        *(f"{_LAYER}.mlp.{each}_proj" for each in ("gate", "up", "down")),
        f"{_LAYER}.post_attention_layernorm",
        "model.norm",
    ).replaced(
        {
            f"{_MAMBA}.in_proj": "layers.{i}.attn.inputs",
            f"{_MAMBA}.conv1d": "layers.{i}.attn.conv",
            f"{_MAMBA}.x_proj": "layers.{i}.attn.maps",
            f"{_MAMBA}.dt_layernorm": "layers.{i}.attn.step_norm",
            f"{_MAMBA}.b_layernorm": "layers.{i}.attn.write_norm",
            f"{_MAMBA}.c_layernorm": "layers.{i}.attn.read_norm",
            f"{_MAMBA}.dt_proj": "layers.{i}.attn.steps",
            f"{_MAMBA}.A_log": "layers.{i}.attn.states:log_rate",
            f"{_MAMBA}.D": "layers.{i}.attn.states:skip",
            f"{_MAMBA}.out_proj": "layers.{i}.attn.out",
            f"{_LAYER}.pre_ff_layernorm": "layers.{i}.mlp_norm",
            f"{_MLP}.gate_proj": "layers.{i}.mlp.gate_up[gate]",
            f"{_MLP}.up_proj": "layers.{i}.mlp.gate_up[up]",
            f"{_MLP}.down_proj": "layers.{i}.mlp.down",
            f"{_MLP}.router": "layers.{i}.mlp.router",
            **expert_rows(f"{_MLP}.experts"),
            **stacked_rows(f"{_MLP}.experts"),
            "model.final_layernorm": "norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "jamba",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 6,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=262144, rotary=False)
        num_layers, hidden_size = fields["num_layers"], fields["hidden_size"]
        count = hf.integer("num_experts", 16, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=_every(hf, "expert_layer", num_layers, period=2, offset=1),
            count=count,
            size=fields["intermediate_size"],
            routing=Routing(hf.integer("num_experts_per_tok", 2)),
        )
        return JambaConfig(
            **fields,
            experts=experts if count > 1 else None,
            attention_layers=_every(hf, "attn_layer", num_layers, period=8, offset=4),
            mamba_size=hf.integer("mamba_expand", 2) * hidden_size,
            **scan_fields(hf.named(JAMBA_SCAN), hidden_size),
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return super().attention(layer)
        return scan_layer(layer, config, inner_size=config.mamba_size, norm=partial(RMSNorm, eps=config.norm_eps))


def _every(hf: HFConfig, name: str, num_layers: int, *, period: int, offset: int) -> frozenset[int]:
    """Return the layers of one kind. Raises InvalidCheckpoint."""
    period = hf.integer(f"{name}_period", period)
    offset = hf.integer(f"{name}_offset", offset, minimum=0)
    if offset >= period:
        hf.invalid(f"{name}_offset", f"which must be below {name}_period = {period}")
    return frozenset(range(offset, num_layers, period))
