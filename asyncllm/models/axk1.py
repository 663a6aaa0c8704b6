"""A.X K1: DeepSeek-V3 with a norm behind the experts."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from torch import nn

from asyncllm.layers.normed_experts import NormedOutputMoE
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v3 import DeepseekV3
from asyncllm.models.grouped_experts import leading_dense
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["AXK1"]

_LAYER = "model.layers.{i}"
_USUAL = {
    "n_routed_experts": 192,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 0,
}


@register(AXK1ForCausalLM="A.X K1 519B-A33B")
class AXK1(DeepseekV3):
    weights = DeepseekV3.weights.replaced(
        {
            f"{_LAYER}.post_mlp_layernorm": "layers.{i}.mlp.output_norm",
            # As transformers has it in memory.
            f"{_LAYER}.mlp.post_mlp_layernorm": "layers.{i}.mlp.output_norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepseekV3.tiny.items() if key not in ("topk_method", "first_k_dense_replace")},
        "model_type": "axk1",
        "mlp_layer_types": ["dense", "sparse"],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.completed(_USUAL)
        dense = leading_dense(hf, hf.integer("num_hidden_layers"), 1)
        # transformers does not read the method: all files choose as DeepSeek-V3 does.
        config = DeepseekV3.configure(hf.changed({"first_k_dense_replace": dense, "topk_method": None}), architecture)
        # Published files, which say how many layers are dense, have no correction; those of transformers have one.
        corrected = hf.fields.get("mlp_layer_types") is not None
        assert config.experts is not None
        return msgspec.structs.replace(config, experts=msgspec.structs.replace(config.experts, corrected=corrected))

    @property
    def weight_map(self) -> WeightMap:
        # Published files have norms behind MLPs too, without use.
        experts = self.config.experts
        dense = set(range(self.config.num_layers)) - (experts.layers if experts is not None else set())
        return super().weight_map.skipping(*(f"model.layers.{layer}.post_mlp_layernorm" for layer in dense))

    def mlp(self, layer: int) -> nn.Module:
        config, experts = self.config, self.config.experts
        if experts is None or layer not in experts.layers:
            return super().mlp(layer)
        return NormedOutputMoE(
            config.hidden_size,
            experts.size,
            norm=self.make_norm(),
            num_experts=experts.count,
            routing=experts.routing,
            corrected=experts.corrected,
            exact_router=experts.exact_router,
            shared_size=experts.shared_size,
        )
