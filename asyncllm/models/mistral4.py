"""Mistral Small 4: DeepSeek's latent attention with Ministral 3's scaling of queries, and experts chosen by softmax."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v2 import DeepseekV2
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.ministral3 import Ministral3, growing_queries
from asyncllm.models.registry import register

__all__ = ["Mistral4"]

_USUAL = {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@register(Mistral4ForCausalLM="Mistral Small 4: the text model")
class Mistral4(LatentDecoder):
    weights = LATENT_WEIGHTS.replaced(DEEPSEEK_EXPERTS)
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepseekV2.tiny.items() if key != "topk_method"},
        "model_type": "mistral4",
        "norm_topk_prob": True,
        "rope_parameters": {**Ministral3.tiny["rope_parameters"], "mscale_all_dim": 0.5},
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.changed({key: value for key, value in _USUAL.items() if key not in hf.fields})
        # Which part of a query is rotated; the parts' sizes say so too.
        hf, rope = hf.changed({"partial_rotary_factor": None}), hf.fields.get("rope_parameters")
        if isinstance(rope, dict):
            hf = hf.changed({"rope_parameters": {**rope, "partial_rotary_factor": None}})
        hf, scaling = growing_queries(
            hf, {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
        )
        fields = latent_fields(hf, architecture, max_position=1048576)
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=hf.integer("first_k_dense_replace", 0, minimum=0),
            count=hf.integer("n_routed_experts", 128),
            shared=hf.integer("n_shared_experts", 1, minimum=0),
            size=hf.integer("moe_intermediate_size", 2048),
            routing=grouped_routing(hf, "softmax", top_k=4),
        )
        return LatentConfig(
            **fields, experts=experts, interleaved=hf.flag("rope_interleave", True), query_scaling=scaling
        )
