"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, sparse experts, and a shared expert weighted per token."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.qwen3_moe import QWEN_EXPERTS, qwen_experts
from asyncllm.models.registry import register

__all__ = ["Qwen2MoE"]


@register(Qwen2MoeForCausalLM="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B")
class Qwen2MoE(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            **QWEN_EXPERTS,
            "model.layers.{i}.mlp.shared_expert.gate_proj": "layers.{i}.mlp.shared.gate_up[gate]",
            "model.layers.{i}.mlp.shared_expert.up_proj": "layers.{i}.mlp.shared.gate_up[up]",
            "model.layers.{i}.mlp.shared_expert.down_proj": "layers.{i}.mlp.shared.down",
            "model.layers.{i}.mlp.shared_expert_gate": "layers.{i}.mlp.shared_gate",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen2_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=32768)
        num_layers = fields["num_layers"]
        if hf.flag("use_sliding_window", False):
            window, last = hf.integer("sliding_window", 4096), hf.integer("max_window_layers", 28, minimum=0)
            # Unlike in the dense models, every other layer before the last of these slides.
            sliding = [layer % 2 == 0 and layer < last for layer in range(num_layers)]
            fields["windows"] = hf.windows(num_layers, window, sliding)
        shared = hf.integer("shared_expert_intermediate_size", 5632)
        experts = qwen_experts(hf, num_layers, count=60, per_token=4, size=1408, shared_size=shared)
        return ModelConfig(**fields, qkv_bias=hf.flag("qkv_bias", True), experts=experts)
