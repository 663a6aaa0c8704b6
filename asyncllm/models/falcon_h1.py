"""Falcon-H1: attention and Mamba-2 in parallel in every layer, with multipliers nearly everywhere."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import AnyBlock, Block
from asyncllm.layers.joint_mixers import JointMixers
from asyncllm.layers.mlp import ScaledMLP
from asyncllm.layers.scaled_mamba2 import Gate, ScaledMamba2
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mamba_hybrid import MAMBA_WEIGHTS, MambaConfig, mamba_fields, mamba_sizes
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["FalconH1"]

_LAYER = "model.layers.{i}"


class FalconH1Config(MambaConfig, frozen=True, kw_only=True):
    attention_scales: tuple[float, float]
    """Factors of attention's input and output."""
    mamba_scales: tuple[float, float]
    """Factors of Mamba-2's input and output."""
    mamba_multipliers: tuple[float, ...]
    """See `ScaledMamba2`."""
    mamba_gate: Gate
    mamba_out_bias: bool
    mlp_scales: tuple[float, ...]
    """Factors of the gate and of the result."""


@register(FalconH1ForCausalLM="Falcon-H1 0.5B to 34B")
class FalconH1(DecoderLM):
    config: FalconH1Config
    weights = WeightMap(
        {
            "model.embed_tokens": "embed",
            "lm_head": "head",
            "model.final_layernorm": "norm",
            f"{_LAYER}.input_layernorm": "layers.{i}.attn_norm",
            f"{_LAYER}.pre_ff_layernorm": "layers.{i}.mlp_norm",
            **{name: target.replace(".attn.", ".attn.state.") for name, target in MAMBA_WEIGHTS.items()},
            **{f"{_LAYER}.self_attn.{part}_proj": f"layers.{{i}}.attn.attention.qkv[{part}]" for part in "qkv"},
            f"{_LAYER}.self_attn.o_proj": "layers.{i}.attn.attention.out",
            f"{_LAYER}.feed_forward.gate_proj": "layers.{i}.mlp.gate_up[gate]",
            f"{_LAYER}.feed_forward.up_proj": "layers.{i}.mlp.gate_up[up]",
            f"{_LAYER}.feed_forward.down_proj": "layers.{i}.mlp.down",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "falcon_h1",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "mlp_bias": True,
        "projectors_bias": True,
        "mamba_proj_bias": True,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "lm_head_multiplier": 0.6,
        "embedding_multiplier": 1.7,
        "mlp_multipliers": [0.7, 0.4],
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.5,
        "ssm_multipliers": [0.6, 0.7, 0.8, 0.9, 1.1],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.4,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=8192, norm_eps=1e-5)
        bias = hf.flag("attention_bias", False)
        inner = hf.optional_integer("mamba_d_ssm", 1024)
        norm_before_gate = hf.flag("mamba_norm_before_gate", True)
        gate: Gate = "alone"
        if hf.flag("mamba_rms_norm", False):
            gate = "after_norm" if norm_before_gate else "before_norm"
        return FalconH1Config(
            **fields,
            **mamba_fields(hf, fields["hidden_size"], inner),
            attention_layers=frozenset(range(fields["num_layers"])),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            score_scale=fields["head_dim"] ** -0.5 * hf.number("key_multiplier", 1.0),
            embedding_scale=hf.number("embedding_multiplier", 1.0),
            logit_scale=hf.number("lm_head_multiplier", 1.0),
            attention_scales=(hf.number("attention_in_multiplier", 1.0), hf.number("attention_out_multiplier", 1.0)),
            mamba_scales=(hf.number("ssm_in_multiplier", 1.0), hf.number("ssm_out_multiplier", 1.0)),
            mamba_multipliers=hf.numbers("ssm_multipliers", 5),
            mamba_gate=gate,
            mamba_out_bias=hf.flag("projectors_bias", False),
            mlp_scales=hf.numbers("mlp_multipliers", 2),
        )

    def block(self, layer: int) -> AnyBlock:
        config = self.config
        attention = super().attention(layer)
        assert isinstance(attention, Attention)
        # Each layer has two caches.
        attention.layer = 2 * layer
        state = ScaledMamba2(
            2 * layer + 1,
            config.hidden_size,
            **mamba_sizes(config),
            out_bias=config.mamba_out_bias,
            gate=config.mamba_gate,
            multipliers=config.mamba_multipliers,
        )
        (attended, attends), (stated, states) = config.attention_scales, config.mamba_scales
        return Block(
            attn_norm=self.make_norm(),
            attn=JointMixers(attention, state, in_factors=(attended, stated), out_factors=(attends, states)),
            mlp_norm=self.make_norm(),
            mlp=self.mlp(layer),
        )

    def mlp(self, layer: int) -> nn.Module:
        config = self.config
        gate_scale, scale = config.mlp_scales
        return ScaledMLP(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, gate_scale=gate_scale, scale=scale
        )
