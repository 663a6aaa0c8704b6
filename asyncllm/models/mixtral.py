"""Mixtral: Mistral with sparse experts and renormalised weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import stacked_rows
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Mixtral", "mixtral_experts"]


@register(MixtralForCausalLM="Mixtral 8x7B, 8x22B")
class Mixtral(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.block_sparse_moe.gate": "layers.{i}.mlp.router",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1": "layers.{i}.mlp.gate_up[gate,{e}]",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3": "layers.{i}.mlp.gate_up[up,{e}]",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w2": "layers.{i}.mlp.down[{e}]",
            # As transformers 5 has them in memory.
            "model.layers.{i}.mlp.gate": "layers.{i}.mlp.router",
            **stacked_rows("model.layers.{i}.mlp.experts"),
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mixtral",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=131072, theta=1e6, norm_eps=1e-5)
        fields["windows"] = hf.windows(fields["num_layers"], hf.optional_integer("sliding_window"))
        return ModelConfig(**fields, experts=mixtral_experts(hf, fields))


def mixtral_experts(hf: HFConfig, fields: Mapping[str, Any]) -> ExpertsConfig:
    """Return experts in all layers, according to the file and to `fields`, of `HFConfig.decoder`. Raises
    InvalidCheckpoint."""
    count = hf.integer("num_local_experts", 8, maximum=MAX_EXPERTS)
    return ExpertsConfig(
        layers=frozenset(range(fields["num_layers"])),
        count=count,
        size=fields["intermediate_size"],
        routing=Routing(hf.integer("num_experts_per_tok", 2, maximum=count), renormalize=True),
    )
