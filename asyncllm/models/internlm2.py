"""InternLM2 and 2.5: Llama under other names, with q, k and v in one tensor, grouped by KV head."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["InternLM2"]


@register(InternLM2ForCausalLM="InternLM2, InternLM2.5")
class InternLM2(DecoderLM):
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
        }
    )
    head_name = "output.weight"
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
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        bias = hf.flag("bias", True)
        return ModelConfig(**hf.decoder(architecture), qkv_bias=bias, out_bias=bias)
