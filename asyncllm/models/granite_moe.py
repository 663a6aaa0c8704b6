"""Granite 3 with experts: Granite's multipliers, all experts of a layer in one tensor, and optionally a shared MLP."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.expert_rows import expert_rows, stacked_rows
from asyncllm.models.granite import Granite
from asyncllm.models.registry import register

__all__ = ["GraniteMoE"]


@register(
    GraniteMoeForCausalLM="Granite 3 1B-A400M, 3B-A800M",
    GraniteMoeSharedForCausalLM="Granite with experts and a shared one",
)
class GraniteMoE(Granite):
    weights = Granite.weights.replaced(
        {
            "model.layers.{i}.block_sparse_moe.router": "layers.{i}.mlp.router",
            "model.layers.{i}.block_sparse_moe.router.layer": "layers.{i}.mlp.router",
            "model.layers.{i}.block_sparse_moe.input_linear": "layers.{i}.mlp.gate_up[gate+up:stacked]",
            "model.layers.{i}.block_sparse_moe.output_linear": "layers.{i}.mlp.down[:stacked]",
            **expert_rows("model.layers.{i}.block_sparse_moe.experts"),
            **stacked_rows("model.layers.{i}.block_sparse_moe.experts"),
            "model.layers.{i}.shared_mlp.input_linear": "layers.{i}.mlp.shared.gate_up[gate+up]",
            "model.layers.{i}.shared_mlp.output_linear": "layers.{i}.mlp.shared.down",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **Granite.tiny,
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        dense = Granite.configure(hf, architecture)
        count = hf.integer("num_local_experts", 8, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(dense.num_layers)),
            count=count,
            size=dense.intermediate_size,
            routing=Routing(hf.integer("num_experts_per_tok", 2, maximum=count), renormalize=True),
            shared_size=hf.integer("shared_intermediate_size", 0, minimum=0),
        )
        return msgspec.structs.replace(dense, experts=experts)
