"""Flint: Qwen3-MoE with sinks, experts weighted by sigmoids, one shared expert, and rotation only in layers with a
window."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.qwen2_moe import Qwen2MoE
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.qwen3_moe import qwen_experts
from asyncllm.models.registry import register

__all__ = ["Flint"]


@register(FlintForCausalLM="Flint 19B-A2B")
class Flint(DecoderLM):
    weights = (
        Qwen2MoE.weights.without("model.layers.{i}.mlp.shared_expert_gate")
        .replaced(QWEN3_WEIGHTS.rows)
        .replaced(
            {
                # As published, and as written by transformers.
                "model.layers.{i}.self_attn.softmax_offset": "layers.{i}.attn.sinks:sinks",
                "model.layers.{i}.self_attn.sinks": "layers.{i}.attn.sinks:sinks",
            }
        )
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "flint",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf = hf.changed(
            {
                "mlp_only_layers": hf.fields.get("mlp_only_layers", [0, 1]),
                "norm_topk_prob": hf.flag("norm_topk_prob", True),
            }
        )
        fields = hf.decoder(architecture, max_position=262144, head_dim=128)
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        sliding = [1 < layer < num_layers - 1 and layer % 4 != 1 for layer in range(num_layers)]
        fields["windows"] = hf.windows(num_layers, hf.integer("sliding_window", 513), sliding)
        shared = hf.integer("shared_expert_intermediate_size", 1024)
        experts = qwen_experts(hf, num_layers, count=256, per_token=6, size=512, shared_size=shared)
        return ModelConfig(
            **fields,
            layer_ropes=tuple(None if window is None else fields["rope"] for window in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            sinks=True,
            experts=msgspec.structs.replace(
                experts, routing=experts.routing._replace(scores="sigmoid"), shared_gate=False, exact_router=True
            ),
        )
