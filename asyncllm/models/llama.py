"""Llama 1, 2, 3, 3.1 and 3.2, and what shares their layout: Code Llama, Vicuna, Yi."""

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

__all__ = ["LLAMA_WEIGHTS", "Llama", "LlamaConfig"]

LLAMA_WEIGHTS = WeightMap(
    {
        "model.embed_tokens": "embed",
        "model.layers.{i}.input_layernorm": "layers.{i}.attn_norm",
        "model.layers.{i}.self_attn.q_proj": "layers.{i}.attn.qkv[q]",
        "model.layers.{i}.self_attn.k_proj": "layers.{i}.attn.qkv[k]",
        "model.layers.{i}.self_attn.v_proj": "layers.{i}.attn.qkv[v]",
        "model.layers.{i}.self_attn.o_proj": "layers.{i}.attn.out",
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
        "model.layers.{i}.mlp.gate_proj": "layers.{i}.mlp.gate_up[gate]",
        "model.layers.{i}.mlp.up_proj": "layers.{i}.mlp.gate_up[up]",
        "model.layers.{i}.mlp.down_proj": "layers.{i}.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    },
    # Early Llama checkpoints store the rotary frequencies, which config.json determines.
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)


class LlamaConfig(ModelConfig, frozen=True, kw_only=True):
    attention_bias: bool
    """Biases of q, k, v and the output projection."""
    mlp_bias: bool


@register("LlamaForCausalLM", "LLaMAForCausalLM")
class Llama(DecoderLM):
    config: LlamaConfig
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> LlamaConfig:
        hf.expect("hidden_act", "silu")
        return LlamaConfig(
            **hf.decoder(architecture),
            attention_bias=hf.flag("attention_bias", False),
            mlp_bias=hf.flag("mlp_bias", False),
        )

    def block(self, layer: int) -> Block:
        config = self.config
        return Block(
            attn_norm=RMSNorm(config.hidden_size, config.rms_eps),
            attn=Attention(
                config.hidden_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
            ),
            mlp_norm=RMSNorm(config.hidden_size, config.rms_eps),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
        )
