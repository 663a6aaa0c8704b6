"""Phi-3.5-MoE: Mixtral with layer norms, biases, and the sparsemixer's routing of experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mixtral import Mixtral
from asyncllm.models.registry import register

__all__ = ["PhiMoE"]


@register(PhimoeForCausalLM="Phi-3.5-MoE", PhiMoEForCausalLM="its own code")
class PhiMoE(DecoderLM):
    weights = Mixtral.weights.replaced({"model.layers.{i}.mlp.router": "layers.{i}.mlp.router"})
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "phimoe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.2,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("num_experts_per_tok", 2)
        fields = hf.decoder(architecture, max_position=131072, theta=1e6, norm_eps=1e-5)
        fields["windows"] = hf.windows(fields["num_layers"], hf.optional_integer("sliding_window"))
        bias = hf.flag("attention_bias", False)
        experts = ExpertsConfig(
            layers=frozenset(range(fields["num_layers"])),
            count=hf.integer("num_local_experts", 16, minimum=2, maximum=MAX_EXPERTS),
            size=fields["intermediate_size"],
            routing=Routing(2, "sparsemixer", near=2 * hf.number("router_jitter_noise", 0.01, positive=False)),
        )
        return ModelConfig(
            **fields, qkv_bias=bias, out_bias=bias, head_bias=hf.flag("lm_head_bias", False), experts=experts
        )
