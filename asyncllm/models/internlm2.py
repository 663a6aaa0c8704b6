"""InternLM2 and 2.5: Llama's computation under other names, with q, k and v in one tensor grouped by KV head."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.norm import RMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["InternLM2"]


class InternLM2Config(ModelConfig, frozen=True, kw_only=True):
    bias: bool
    """Biases of wqkv and wo."""


@register("InternLM2ForCausalLM")
class InternLM2(DecoderLM):
    config: InternLM2Config
    weights = WeightMap(
        {
            "model.tok_embeddings": "embed",
            "model.layers.{i}.attention_norm": "layers.{i}.attn_norm",
            "model.layers.{i}.attention.wqkv": "layers.{i}.attn.qkv[q+k+v:grouped]",
            "model.layers.{i}.attention.wo": "layers.{i}.attn.out",
            "model.layers.{i}.ffn_norm": "layers.{i}.mlp_norm",
            "model.layers.{i}.feed_forward.w1": "layers.{i}.mlp.gate_up[gate]",
            "model.layers.{i}.feed_forward.w3": "layers.{i}.mlp.gate_up[up]",
            "model.layers.{i}.feed_forward.w2": "layers.{i}.mlp.down",
            "model.norm": "norm",
            "output": "head",
        },
        ignored=("model.layers.{i}.attention.rotary_emb.inv_freq",),
    )
    tied_head = "output.weight"
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "internlm2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> InternLM2Config:
        hf.expect("hidden_act", "silu")
        return InternLM2Config(**hf.decoder(architecture), bias=hf.flag("bias", True))

    def block(self, layer: int) -> Block:
        config = self.config
        return Block(
            attn_norm=RMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qkv_bias=config.bias,
                out_bias=config.bias,
            ),
            mlp_norm=RMSNorm(config.hidden_size, config.rms_eps),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size),
        )
