"""Hunyuan with experts (A13B): Hunyuan's attention, experts in every layer, and a shared expert."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.hunyuan import HUNYUAN_WEIGHTS, Hunyuan
from asyncllm.models.qwen3_moe import QWEN_EXPERTS
from asyncllm.models.registry import register

__all__ = ["HunyuanMoE"]


@register(HunYuanMoEV1ForCausalLM="Hunyuan-A13B")
class HunyuanMoE(DecoderLM):
    weights = HUNYUAN_WEIGHTS.replaced(
        {
            **QWEN_EXPERTS,
            "model.layers.{i}.mlp.gate.wg": "layers.{i}.mlp.router",
            "model.layers.{i}.mlp.shared_mlp.gate_proj": "layers.{i}.mlp.shared.gate_up[gate]",
            "model.layers.{i}.mlp.shared_mlp.up_proj": "layers.{i}.mlp.shared.gate_up[up]",
            "model.layers.{i}.mlp.shared_mlp.down_proj": "layers.{i}.mlp.shared.down",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **Hunyuan.tiny,
        "model_type": "hunyuan_v1_moe",
        "num_experts": 4,
        "moe_topk": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        dense = Hunyuan.configure(hf, architecture)
        count = hf.integer("num_experts", hf.fields.get("num_local_experts", 1), maximum=MAX_EXPERTS)
        size = dense.intermediate_size
        for key, value in (("moe_topk", None), ("moe_intermediate_size", size), ("num_shared_expert", 1)):
            hf = hf.changed({key: _of_all_layers(hf, key, value)})
        hf.expect("moe_intermediate_size", size)
        hf.expect("num_shared_expert", 1)
        experts = ExpertsConfig(
            layers=frozenset(range(dense.num_layers)),
            count=count,
            size=size,
            routing=Routing(hf.integer("moe_topk", 1, maximum=count), renormalize=True),
            exact_router=True,
            shared_size=size,
        )
        return msgspec.structs.replace(dense, experts=experts)


def _of_all_layers(hf: HFConfig, key: str, usual: int | None) -> Any:
    """Return a number, which files may give as a list with one entry per layer."""
    value = hf.fields.get(key)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return usual if value is None else value
