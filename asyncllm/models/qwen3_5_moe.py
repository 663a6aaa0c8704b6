"""Qwen3.5 with experts: Qwen3.5's layers with Qwen3-Next's experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.qwen3_5 import APART, Qwen35
from asyncllm.models.qwen3_moe import qwen_experts
from asyncllm.models.qwen3_next import Qwen3Next, Qwen3NextConfig, delta_fields
from asyncllm.models.registry import register

__all__ = ["Qwen35MoE"]


@register(Qwen3_5MoeForCausalLM="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B: the text model")
class Qwen35MoE(Qwen3Next):
    weights = Qwen3Next.weights.without(
        *(f"model.layers.{{i}}.linear_attn.in_proj_{each}" for each in ("qkvz", "ba"))
    ).replaced(APART)
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in Qwen35.tiny.items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "rms_norm_eps": 0.5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        # Expert weights are always renormalised.
        hf.expect("norm_topk_prob", True)
        hf = hf.changed({"norm_topk_prob": True})
        size, shared_size = (hf.integer(f"{each}_intermediate_size", 512) for each in ("moe", "shared_expert"))
        fields = hf.decoder(architecture, max_position=32768, head_dim=256, partial_rotary=0.25, intermediate_size=size)
        num_layers = fields["num_layers"]
        return Qwen3NextConfig(
            **fields,
            **delta_fields(hf, num_layers),
            experts=qwen_experts(hf, num_layers, count=256, per_token=8, size=size, shared_size=shared_size),
        )
