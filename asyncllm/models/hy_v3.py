"""Hunyuan 3: Qwen3's attention, and experts chosen by corrected sigmoid scores, after one dense layer."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, sparse_layers
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["HYV3"]

_MLP = "model.layers.{i}.mlp"


@register(HYV3ForCausalLM="Hunyuan 3 preview")
class HYV3(DecoderLM):
    # As published, and as transformers has them in memory.
    weights = QWEN3_WEIGHTS.replaced(
        {
            **DEEPSEEK_EXPERTS,
            f"{_MLP}.router.gate": "layers.{i}.mlp.router",
            f"{_MLP}.expert_bias": "layers.{i}.mlp.correction:bias",
            f"{_MLP}.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_MLP}.shared_mlp.gate_proj": "layers.{i}.mlp.shared.gate_up[gate]",
            f"{_MLP}.shared_mlp.up_proj": "layers.{i}.mlp.shared.gate_up[up]",
            f"{_MLP}.shared_mlp.down_proj": "layers.{i}.mlp.shared.down",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "hy_v3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "router_scaling_factor": 2.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("mlp_bias", False)
        fields = hf.decoder(architecture, max_position=131072, theta=11158840.0, head_dim=128, norm_eps=1e-5)
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        count = hf.integer("num_experts", 192, maximum=MAX_EXPERTS)
        size = hf.integer("moe_intermediate_size", 1536)
        experts = ExpertsConfig(
            layers=sparse_layers(hf, num_layers),
            count=count,
            size=size,
            routing=Routing(
                hf.integer("num_experts_per_tok", 8, maximum=count),
                scores="sigmoid",
                renormalize=True,
                scale=hf.number("router_scaling_factor", 2.826),
            ),
            corrected=True,
            exact_router=True,
            shared_size=size * hf.integer("num_shared_experts", 1, minimum=0),
        )
        return ModelConfig(
            **fields,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            experts=experts,
            extra_layers=hf.integer("num_nextn_predict_layers", 1, minimum=0),
        )
