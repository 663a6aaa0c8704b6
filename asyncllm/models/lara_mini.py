"""Lara Mini: gated delta nets with one projection for all inputs, between layers with a window, which alone rotate, and
layers that see all tokens; experts as in Flint, chosen by softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.delta_net import JointDeltaNet
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.flint import Flint
from asyncllm.models.qwen3_moe import qwen_experts
from asyncllm.models.qwen3_next import DELTA_WEIGHTS, Qwen3NextConfig, delta_fields, delta_net
from asyncllm.models.registry import register

__all__ = ["LaraMini"]

_LAYER = "model.layers.{i}"
_LINEAR = f"{_LAYER}.linear_attn"
_KINDS = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
"""Kinds of the first layers, which repeat."""


@register(LaraMiniForCausalLM="Lara 4 Mini")
class LaraMini(DecoderLM):
    config: Qwen3NextConfig
    weights = Flint.weights.without(f"{_LAYER}.self_attn.softmax_offset", f"{_LAYER}.self_attn.sinks").replaced(
        {
            **{row: target for row, target in DELTA_WEIGHTS.items() if row.startswith(_LINEAR)},
            f"{_LINEAR}.in_proj": "layers.{i}.attn.inputs[q+k+v+gate+beta+step]",
            f"{_LINEAR}.out_norm": "layers.{i}.attn.norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "lara_mini",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-2,
        "attention_bias": True,
        "sliding_window": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf = hf.changed({"norm_topk_prob": hf.flag("norm_topk_prob", True)})
        size, shared_size = (hf.integer(f"{each}_intermediate_size", 512) for each in ("moe", "shared_expert"))
        fields = hf.decoder(architecture, max_position=131072, head_dim=128, tied=True, intermediate_size=size)
        num_layers = fields["num_layers"]
        kinds = hf.layer_kinds(num_layers, tuple(set(_KINDS)), [_KINDS[i % len(_KINDS)] for i in range(num_layers)])
        window = hf.integer("sliding_window", 512)
        fields["windows"] = tuple(window if kind == "sliding_attention" else None for kind in kinds)
        nets = ["linear_attention" if kind == "linear_attention" else "full_attention" for kind in kinds]
        usual = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
        delta = hf.changed({**usual, **hf.fields, "layer_types": nets})
        experts = qwen_experts(hf, num_layers, count=128, per_token=4, size=size, shared_size=shared_size)
        return Qwen3NextConfig(
            **fields,
            **delta_fields(delta, num_layers),
            layer_ropes=tuple(fields["rope"] if kind == "sliding_attention" else None for kind in kinds),
            experts=msgspec.structs.replace(experts, shared_gate=False, exact_router=True),
        )

    def attention(self, layer: int) -> AnyAttention:
        if layer in self.config.attention_layers:
            return super().attention(layer)
        return delta_net(layer, self.config, norm_eps=self.config.norm_eps, kind=JointDeltaNet)
