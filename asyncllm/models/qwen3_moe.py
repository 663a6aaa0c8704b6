"""Qwen3-MoE: Qwen3's attention; sparse experts in the layers selected by decoder_sparse_step and mlp_only_layers."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import expert_rows, stacked_rows
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["QWEN_EXPERTS", "Qwen3MoE", "qwen_experts"]

QWEN_EXPERTS = {
    "model.layers.{i}.mlp.gate": "layers.{i}.mlp.router",
    **expert_rows("model.layers.{i}.mlp.experts"),
    **stacked_rows("model.layers.{i}.mlp.experts"),
}


def qwen_experts(
    hf: HFConfig, num_layers: int, *, count: int, per_token: int, size: int, shared_size: int = 0
) -> ExpertsConfig:
    """Return the experts as all Qwen families read them; the numbers are defaults for absent keys."""
    # transformers 5 writes this count under Mixtral's name.
    num_experts = hf.integer("num_experts", hf.fields.get("num_local_experts", count), maximum=MAX_EXPERTS)
    step = hf.integer("decoder_sparse_step", 1)
    dense = hf.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        hf.invalid("mlp_only_layers", f"where a list of layers below {num_layers} belongs")
    return ExpertsConfig(
        layers=frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
        count=num_experts,
        size=hf.integer("moe_intermediate_size", size),
        routing=Routing(
            hf.integer("num_experts_per_tok", per_token, maximum=num_experts),
            renormalize=hf.flag("norm_topk_prob", False),
        ),
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )


@register(Qwen3MoeForCausalLM="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder")
class Qwen3MoE(DecoderLM):
    weights = QWEN3_WEIGHTS.replaced(
        {
            **QWEN_EXPERTS,
            # With a Qwen3-VL decoder they are stacked: transposed as published, otherwise as written by transformers 5.
            "model.layers.{i}.mlp.experts.gate_up_proj": "layers.{i}.mlp.gate_up:weight[gate+up:stacked_either]",
            "model.layers.{i}.mlp.experts.down_proj": "layers.{i}.mlp.down:weight[:stacked_either]",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "use_sliding_window": True,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=32768)
        num_layers = fields["num_layers"]
        experts = qwen_experts(hf, num_layers, count=128, per_token=8, size=768)
        # Unlike in the dense models, every layer of these slides or none does.
        sliding = hf.flag("use_sliding_window", False)
        fields["windows"] = hf.windows(num_layers, hf.optional_integer("sliding_window", 4096) if sliding else None)
        bias = hf.flag("attention_bias", False)
        return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, qk_norm="head", experts=experts)
