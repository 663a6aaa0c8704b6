"""Mixtral: Mistral with sparse experts, the chosen ones' weights renormalised."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import RMSNorm
from asyncllm.models.config import MAX_EXPERTS, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Mixtral"]


class MixtralConfig(ModelConfig, frozen=True, kw_only=True):
    num_experts: int
    experts_per_token: int


@register("MixtralForCausalLM")
class Mixtral(DecoderLM):
    config: MixtralConfig
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.block_sparse_moe.gate": "layers.{i}.mlp.router",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1": "layers.{i}.mlp.gate_up[gate,{e}]",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3": "layers.{i}.mlp.gate_up[up,{e}]",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w2": "layers.{i}.mlp.down[{e}]",
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
    def configure(hf: HFConfig, architecture: str) -> MixtralConfig:
        hf.expect("hidden_act", "silu")
        num_experts = hf.integer("num_local_experts", 8, maximum=MAX_EXPERTS)
        config = MixtralConfig(
            **hf.decoder(architecture, max_position=131072, theta=1e6, rms_eps=1e-5),
            num_experts=num_experts,
            experts_per_token=hf.integer("num_experts_per_tok", 2, maximum=num_experts),
        )
        window = hf.optional_integer("sliding_window")
        windows = hf.windows(config.num_layers, window, [True] * config.num_layers)
        return msgspec.structs.replace(config, windows=windows)

    def block(self, layer: int) -> Block:
        config = self.config
        return Block(
            attn_norm=RMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                window=config.windows[layer],
            ),
            mlp_norm=RMSNorm(config.hidden_size, config.rms_eps),
            mlp=MoE(
                config.hidden_size,
                config.intermediate_size,
                num_experts=config.num_experts,
                top_k=config.experts_per_token,
                renormalize=True,
            ),
        )
