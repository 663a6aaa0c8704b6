"""DeepSeek-V3, V3.1, R1 and Kimi-K2, which has the same layout: experts chosen by corrected sigmoid scores."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v2 import DeepseekV2
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register

__all__ = ["DeepseekV3"]


@register(DeepseekV3ForCausalLM="DeepSeek-V3, V3.1, R1, Kimi-K2")
class DeepseekV3(LatentDecoder):
    config: LatentConfig
    weights = LATENT_WEIGHTS.replaced(
        {**DEEPSEEK_EXPERTS, "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias"}
    )
    tiny: ClassVar[dict[str, Any]] = {
        **DeepseekV2.tiny,
        "model_type": "deepseek_v3",
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("topk_method", "noaux_tc")
        hf.expect("scoring_func", "sigmoid")
        fields = latent_fields(hf, architecture, max_position=4096)
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=hf.integer("first_k_dense_replace", 3, minimum=0),
            count=hf.integer("n_routed_experts", 256),
            shared=hf.integer("n_shared_experts", 1),
            size=hf.integer("moe_intermediate_size", 2048),
            corrected=True,
            routing=grouped_routing(hf, top_k=8, scale=2.5, groups=8, top_groups=4),
        )
        return LatentConfig(
            **fields,
            experts=experts,
            interleaved=hf.flag("rope_interleave", True),
            extra_layers=hf.integer("num_nextn_predict_layers", 1, minimum=0),
        )
