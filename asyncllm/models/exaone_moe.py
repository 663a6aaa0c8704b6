"""K-EXAONE: EXAONE 4's attention with pre-norms, and DeepSeek-V3's routing of experts."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.exaone4 import Exaone4
from asyncllm.models.glm4_moe import Glm4MoE
from asyncllm.models.grouped_experts import grouped_experts, grouped_routing, leading_dense
from asyncllm.models.registry import register

__all__ = ["ExaoneMoE"]


@register(ExaoneMoeForCausalLM="K-EXAONE 236B-A23B", ExaoneMoEForCausalLM="K-EXAONE 236B-A23B, its first files")
class ExaoneMoE(DecoderLM):
    # Its layer that predicts further tokens is not loaded.
    weights = Glm4MoE.weights.replaced(
        {"model.layers.{i}.mlp.e_score_correction_bias": "layers.{i}.mlp.correction:bias"}
    ).skipping("mtp")
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "exaone_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("scoring_func", "sigmoid")
        dense = Exaone4.configure(hf, architecture)
        experts = grouped_experts(
            hf,
            dense.num_layers,
            first=leading_dense(hf, dense.num_layers, 1),
            count=hf.integer("num_experts", 64),
            shared=hf.integer("num_shared_experts", 1, minimum=0),
            size=hf.integer("moe_intermediate_size", 1024),
            corrected=True,
            routing=grouped_routing(hf, top_k=8, scale=2.5),
        )
        return msgspec.structs.replace(dense, experts=experts)
