"""OLMoE: Llama with joint norms of all heads' queries and keys, and sparse experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.qwen3_moe import QWEN_EXPERTS
from asyncllm.models.registry import register

__all__ = ["Olmoe"]


@register(OlmoeForCausalLM="OLMoE 1B-7B")
class Olmoe(DecoderLM):
    weights = QWEN3_WEIGHTS.replaced(QWEN_EXPERTS)
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "olmoe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", False)
        if hf.fields.get("clip_qkv") is not None:
            hf.unsupported("clip_qkv", "Released OLMoE checkpoints have null.")
        fields = hf.decoder(architecture, max_position=4096, norm_eps=1e-5)
        count = hf.integer("num_experts", hf.fields.get("num_local_experts", 64), maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(fields["num_layers"])),
            count=count,
            size=fields["intermediate_size"],
            routing=Routing(
                hf.integer("num_experts_per_tok", 8, maximum=count), renormalize=hf.flag("norm_topk_prob", False)
            ),
        )
        return ModelConfig(**fields, qk_norm="whole", experts=experts)
