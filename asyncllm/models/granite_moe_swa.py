"""Granite with a window and experts: sinks, a window in three of four layers, and the experts of Granite 3."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.granite_moe import GraniteMoE
from asyncllm.models.granite_swa import GraniteSWA, with_windows
from asyncllm.models.registry import register

__all__ = ["GraniteMoESWA"]

_MLP = "model.layers.{i}.block_sparse_moe"


@register(GraniteMoeSWAForCausalLM="Granite SWASH 3B-A600M")
class GraniteMoESWA(GraniteMoE):
    weights = GraniteMoE.weights.replaced(
        {
            "model.layers.{i}.self_attn.sinks": "layers.{i}.attn.sinks:sinks",
            f"{_MLP}.router": "layers.{i}.mlp.router",
            f"{_MLP}.experts.gate_up_proj": "layers.{i}.mlp.gate_up:weight[gate+up:stacked]",
            f"{_MLP}.experts.down_proj": "layers.{i}.mlp.down:weight[:stacked]",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in GraniteSWA.tiny.items() if key != "mlp_bias"},
        "model_type": "granitemoe_swa",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        return with_windows(hf, GraniteMoE.configure(hf, architecture))
