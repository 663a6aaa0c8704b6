"""Laguna: numbers of heads by layer, gated outputs of attention, windows, and DeepSeek-V3's routing of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from asyncllm import kernels
from asyncllm.kernels import Routing
from asyncllm.layers.attention import Attention
from asyncllm.layers.gated_attention import HeadGatedAttention
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, sparse_layers
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Laguna"]

_MLP = "model.layers.{i}.mlp"
_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class LagunaConfig(ModelConfig, frozen=True, kw_only=True):
    layer_heads: tuple[int, ...]
    """Query heads of each layer."""
    per_feature_gate: bool
    """Whether each feature has a gate, instead of each head."""


@register(LagunaForCausalLM="Laguna XS.2")
class Laguna(DecoderLM):
    config: LagunaConfig
    weights = QWEN3_WEIGHTS.replaced(
        {
            **DEEPSEEK_EXPERTS,
            **{key.replace("shared_experts", "shared_expert"): row for key, row in DEEPSEEK_EXPERTS.items()},
            "model.layers.{i}.self_attn.g_proj": "layers.{i}.attn.gate",
            f"{_MLP}.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_MLP}.experts.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "laguna",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_attention_heads_per_layer": [4, 6, 4, 2],
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {**_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("gating", True, "per-head", "per-element")
        hf.expect("moe_apply_router_weight_on_input", False)
        hf.expect("moe_router_logit_softcapping", 0, 0.0)
        hf = hf.changed({"rope_parameters": hf.fields.get("rope_parameters") or _ROPES})

        def read(kind: str) -> dict[str, Any]:
            return hf.of_layers(kind).decoder(architecture, max_position=131072, head_dim=128, partial_rotary=1.0)

        fields, sliding = read("full_attention"), read("sliding_attention")
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        fields["windows"] = hf.windows(num_layers, hf.optional_integer("sliding_window", 512), [False] * num_layers)
        count = hf.integer("num_experts", 256, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=sparse_layers(hf, num_layers),
            count=count,
            size=hf.integer("moe_intermediate_size", 512),
            routing=Routing(
                hf.integer("num_experts_per_tok", 8, maximum=count),
                scores="sigmoid",
                renormalize=True,
                scale=hf.number("moe_routed_scaling_factor", 1.0),
            ),
            corrected=True,
            shared_size=hf.integer("shared_expert_intermediate_size", 512),
        )
        return LagunaConfig(
            **fields,
            layer_ropes=tuple((fields if window is None else sliding)["rope"] for window in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            experts=experts,
            layer_heads=_layer_heads(hf, fields),
            per_feature_gate=hf.fields.get("gating") == "per-element",
        )

    def attention(self, layer: int) -> Attention:
        config = self.config
        heads = replace(self.attention_config(layer), num_heads=config.layer_heads[layer])
        gates = config.per_feature_gate
        return HeadGatedAttention(layer, config.hidden_size, heads, activation=kernels.softplus, by_feature=gates)


def _layer_heads(hf: HFConfig, fields: dict[str, Any]) -> tuple[int, ...]:
    num_layers, num_kv_heads = fields["num_layers"], fields["num_kv_heads"]
    heads = hf.fields.get("num_attention_heads_per_layer") or [fields["num_heads"]] * num_layers
    if (
        not isinstance(heads, list)
        or len(heads) != num_layers
        or not all(type(each) is int and 0 < each <= 2**16 and each % num_kv_heads == 0 for each in heads)
    ):
        hf.invalid("num_attention_heads_per_layer", f"where {num_layers} multiples of {num_kv_heads} belong")
    return tuple(heads)
