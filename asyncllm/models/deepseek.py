"""DeepSeek-MoE-16B: Llama with sparse experts after the first layers, and shared experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Deepseek"]


@register(DeepseekForCausalLM="DeepSeek-MoE-16B")
class Deepseek(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(DEEPSEEK_EXPERTS)
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "deepseek",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("scoring_func", "softmax")
        fields, bias = hf.decoder(architecture), hf.flag("attention_bias", False)
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=hf.integer("first_k_dense_replace", 0, minimum=0),
            count=hf.integer("n_routed_experts"),
            shared=hf.integer("n_shared_experts", 0, minimum=0),
            size=hf.integer("moe_intermediate_size", 1407),
            routing=Routing(hf.integer("num_experts_per_tok"), renormalize=hf.flag("norm_topk_prob", False)),
        )
        return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, experts=experts)
