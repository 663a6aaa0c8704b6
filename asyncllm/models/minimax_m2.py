"""MiniMax-M2: Mixtral with joint norms of all heads' queries and keys, half of each head rotated, and experts chosen by
corrected sigmoid scores."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mixtral import Mixtral
from asyncllm.models.registry import register

__all__ = ["MiniMaxM2"]


@register(MiniMaxM2ForCausalLM="MiniMax-M2, M2.1")
class MiniMaxM2(DecoderLM):
    weights = Mixtral.weights.replaced(
        {
            "model.layers.{i}.self_attn.q_norm": "layers.{i}.attn.q_norm",
            "model.layers.{i}.self_attn.k_norm": "layers.{i}.attn.k_norm",
            "model.layers.{i}.block_sparse_moe.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            "model.layers.{i}.mlp.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "minimax_m2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rotary_dim": 12,
        "max_position_embeddings": 128,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("scoring_func", "sigmoid")
        hf.expect("use_routing_bias", True)
        hf.expect("use_qk_norm", True)
        hf.expect("qk_norm_type", "per_layer")
        hf.expect("shared_intermediate_size", 0)
        rotated = hf.optional_integer("rotary_dim")
        if rotated is not None:
            hf = hf.changed({"partial_rotary_factor": rotated / hf.integer("head_dim", 128)})
        fields = hf.decoder(architecture, max_position=196608, theta=5e6, head_dim=128, partial_rotary=1.0)
        count = hf.integer("num_local_experts", 256, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(fields["num_layers"])),
            count=count,
            size=fields["intermediate_size"],
            routing=Routing(hf.integer("num_experts_per_tok", 8, maximum=count), scores="sigmoid", renormalize=True),
            corrected=True,
        )
        extra = hf.integer("num_mtp_modules", 0, minimum=0) if hf.flag("use_mtp", True) else 0
        return ModelConfig(**fields, qk_norm="whole", experts=experts, extra_layers=extra)
