"""Llama 1, 2, 3, 3.1 and 3.2, and models with the same computation: Code Llama, Vicuna, Yi, Aquila, XVERSE."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["LLAMA_WEIGHTS", "Llama"]

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
    }
)


@register(
    LlamaForCausalLM="Llama 1 to 3.3, Code Llama, Vicuna, Yi, Solar, SmolLM 2, DeepSeek LLM and Coder",
    LLaMAForCausalLM="the first conversions of Llama",
    AquilaForCausalLM="Aquila, Aquila2",
    IQuestCoderForCausalLM="IQuest-Coder-V1 40B",
    XverseForCausalLM="XVERSE 7B, 13B, 65B",
    YiForCausalLM="the first files of Yi",
)
class Llama(DecoderLM):
    # The last two are the norms of Yi's first files.
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.ln1": "layers.{i}.attn_norm",
            "model.layers.{i}.ln2": "layers.{i}.mlp_norm",
        }
    )
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
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("num_experts", 0)
        hf.expect("clip_qkv")
        hf.expect("use_sliding_window", False)
        bias = hf.flag("attention_bias", False)
        return ModelConfig(
            **hf.decoder(architecture), qkv_bias=bias, out_bias=bias, mlp_bias=hf.flag("mlp_bias", False)
        )
