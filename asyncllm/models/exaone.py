"""EXAONE 3 and 3.5: Llama under other names."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Exaone"]


@register(ExaoneForCausalLM="EXAONE 3.0, 3.5, Deep")
class Exaone(DecoderLM):
    weights = WeightMap(
        {
            "transformer.wte": "embed",
            "transformer.h.{i}.ln_1": "layers.{i}.attn_norm",
            "transformer.h.{i}.attn.attention.q_proj": "layers.{i}.attn.qkv[q]",
            "transformer.h.{i}.attn.attention.k_proj": "layers.{i}.attn.qkv[k]",
            "transformer.h.{i}.attn.attention.v_proj": "layers.{i}.attn.qkv[v]",
            "transformer.h.{i}.attn.attention.out_proj": "layers.{i}.attn.out",
            "transformer.h.{i}.ln_2": "layers.{i}.mlp_norm",
            "transformer.h.{i}.mlp.c_fc_0": "layers.{i}.mlp.gate_up[gate]",
            "transformer.h.{i}.mlp.c_fc_1": "layers.{i}.mlp.gate_up[up]",
            "transformer.h.{i}.mlp.c_proj": "layers.{i}.mlp.down",
            "transformer.ln_f": "norm",
            "lm_head": "head",
        }
    )
    base_prefix = "transformer."
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "exaone",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "silu",
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("activation_function", "silu")
        words = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
        return ModelConfig(**hf.named(words).decoder(architecture, norm_eps=1e-5))
