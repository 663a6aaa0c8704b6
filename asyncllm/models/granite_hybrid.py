"""Granite 4: Mamba-2 in most layers, attention in the others, Granite's multipliers, and a shared MLP with or without
experts."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.block import AnyAttention
from asyncllm.models.config import HFConfig
from asyncllm.models.granite import Granite
from asyncllm.models.granite_moe import GraniteMoE
from asyncllm.models.mamba_hybrid import MAMBA_WEIGHTS, MambaConfig, attention_layers_of, mamba_fields, mamba_layer
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["GraniteHybrid"]

_DENSE = {
    "model.layers.{i}.shared_mlp.input_linear": "layers.{i}.mlp.gate_up[gate+up]",
    "model.layers.{i}.shared_mlp.output_linear": "layers.{i}.mlp.down",
}


@register(GraniteMoeHybridForCausalLM="Granite 4.0 Micro, Tiny, Small")
class GraniteHybrid(GraniteMoE):
    config: MambaConfig
    weights = GraniteMoE.weights.replaced(MAMBA_WEIGHTS)
    tiny: ClassVar[dict[str, Any]] = {
        **Granite.tiny,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> MambaConfig:
        experts = hf.integer("num_local_experts", 8, minimum=0) > 0
        shared_size = hf.integer("shared_intermediate_size", 1024)
        if not experts:
            hf = hf.changed({"intermediate_size": shared_size})
        base = GraniteMoE.configure(hf, architecture) if experts else Granite.configure(hf, architecture)
        hf.expect("position_embedding_type", "rope", "nope")
        turns = hf.fields.get("position_embedding_type") == "rope"
        if not turns and hf.rope_scaling_factor:
            hf.unsupported("position_embedding_type", "There are no rotary positions to scale: rope_scaling_factor=0.")
        fields = msgspec.structs.asdict(base)
        if not turns:
            fields["rope"] = None
        attention_layers = attention_layers_of(hf, base.num_layers)
        return MambaConfig(
            **fields,
            **mamba_fields(hf, base.hidden_size),
            attention_layers=frozenset() if attention_layers is None else attention_layers,
        )

    @property
    def weight_map(self) -> WeightMap:
        table = super().weight_map
        return table if self.config.experts is not None else table.replaced(_DENSE)

    def attention(self, layer: int) -> AnyAttention:
        return super().attention(layer) if layer in self.config.attention_layers else mamba_layer(self.config, layer)
