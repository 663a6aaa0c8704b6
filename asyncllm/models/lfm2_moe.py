"""LFM2 with experts after some dense layers."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.expert_rows import stacked_rows
from asyncllm.models.lfm2 import Lfm2, Lfm2Config, lfm2_fields
from asyncllm.models.registry import register

__all__ = ["Lfm2MoE"]

_MLP = "model.layers.{i}.feed_forward"


@register(Lfm2MoeForCausalLM="LFM2 8B-A1B")
class Lfm2MoE(Lfm2):
    weights = Lfm2.weights.replaced(
        {
            f"{_MLP}.gate": "layers.{i}.mlp.router",
            f"{_MLP}.expert_bias": "layers.{i}.mlp.correction:bias",
            **stacked_rows(f"{_MLP}.experts"),
            f"{_MLP}.experts.{{e}}.w1": "layers.{i}.mlp.gate_up[gate,{e}]",
            f"{_MLP}.experts.{{e}}.w3": "layers.{i}.mlp.gate_up[up,{e}]",
            f"{_MLP}.experts.{{e}}.w2": "layers.{i}.mlp.down[{e}]",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "lfm2_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 4,
        "conv_bias": True,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        fields = lfm2_fields(hf, architecture)
        count = hf.integer("num_experts", 32, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(hf.integer("num_dense_layers", 2, minimum=0), fields["num_layers"])),
            count=count,
            size=hf.integer("moe_intermediate_size", 1792),
            routing=Routing(
                hf.integer("num_experts_per_tok", 4, maximum=count),
                scores="sigmoid",
                renormalize=hf.flag("norm_topk_prob", True),
                scale=hf.number("routed_scaling_factor", 1.0),
            ),
            corrected=hf.flag("use_expert_bias", True),
        )
        return Lfm2Config(**fields, experts=experts)
