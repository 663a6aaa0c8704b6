"""Qwen3-MoE: Qwen3's attention; sparse experts in the layers that decoder_sparse_step and mlp_only_layers leave."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from torch import nn

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import RMSNorm
from asyncllm.models.config import MAX_EXPERTS, HFConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.qwen3 import QWEN3_WEIGHTS, Qwen3Config
from asyncllm.models.registry import register

__all__ = ["Qwen3MoE"]


class Qwen3MoEConfig(Qwen3Config, frozen=True, kw_only=True):
    num_experts: int
    experts_per_token: int
    expert_size: int
    renormalize: bool
    sparse_layers: frozenset[int]


@register("Qwen3MoeForCausalLM")
class Qwen3MoE(DecoderLM):
    config: Qwen3MoEConfig
    weights = QWEN3_WEIGHTS.replaced(
        {
            "model.layers.{i}.mlp.gate": "layers.{i}.mlp.router",
            "model.layers.{i}.mlp.experts.{e}.gate_proj": "layers.{i}.mlp.gate_up[gate,{e}]",
            "model.layers.{i}.mlp.experts.{e}.up_proj": "layers.{i}.mlp.gate_up[up,{e}]",
            "model.layers.{i}.mlp.experts.{e}.down_proj": "layers.{i}.mlp.down[{e}]",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "use_sliding_window": True,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> Qwen3MoEConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=32768)
        num_layers = fields["num_layers"]
        # transformers 5 writes this count under Mixtral's name.
        num_experts = hf.integer("num_experts", hf.fields.get("num_local_experts", 128), maximum=MAX_EXPERTS)
        step = hf.integer("decoder_sparse_step", 1)
        dense = hf.fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
            hf.invalid("mlp_only_layers", f"where a list of layers below {num_layers} belongs")
        config = Qwen3MoEConfig(
            **fields,
            attention_bias=hf.flag("attention_bias", False),
            num_experts=num_experts,
            experts_per_token=hf.integer("num_experts_per_tok", 8, maximum=num_experts),
            expert_size=hf.integer("moe_intermediate_size", 768),
            renormalize=hf.flag("norm_topk_prob", False),
            sparse_layers=frozenset(
                layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
            ),
        )
        # Unlike the dense models, these slide in every layer or none.
        sliding = hf.flag("use_sliding_window", False)
        window = hf.optional_integer("sliding_window", 4096) if sliding else None
        return msgspec.structs.replace(config, windows=hf.windows(num_layers, window, [True] * num_layers))

    def block(self, layer: int) -> Block:
        config = self.config
        mlp: nn.Module = GatedMLP(config.hidden_size, config.intermediate_size)
        if layer in config.sparse_layers:
            mlp = MoE(
                config.hidden_size,
                config.expert_size,
                num_experts=config.num_experts,
                top_k=config.experts_per_token,
                renormalize=config.renormalize,
            )
        return Block(
            attn_norm=RMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                window=config.windows[layer],
                qk_norm_eps=config.rms_eps,
            ),
            mlp_norm=RMSNorm(config.hidden_size, config.rms_eps),
            mlp=mlp,
        )
