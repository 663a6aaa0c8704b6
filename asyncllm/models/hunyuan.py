"""Hunyuan, dense: Llama with norms of each head's queries and keys after the rotation."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["HUNYUAN_WEIGHTS", "Hunyuan"]

HUNYUAN_WEIGHTS = LLAMA_WEIGHTS.replaced(
    {
        "model.layers.{i}.self_attn.query_layernorm": "layers.{i}.attn.q_norm",
        "model.layers.{i}.self_attn.key_layernorm": "layers.{i}.attn.k_norm",
    }
)


@register(HunYuanDenseV1ForCausalLM="Hunyuan, dense")
class Hunyuan(DecoderLM):
    weights = HUNYUAN_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "hunyuan_v1_dense",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("use_qk_norm", True)
        hf.expect("use_cla", False)
        bias = hf.flag("attention_bias", False)
        hf = _with_base(hf)
        return ModelConfig(**hf.decoder(architecture, norm_eps=1e-5), qkv_bias=bias, out_bias=bias, qk_norm="rotated")


def _with_base(hf: HFConfig) -> HFConfig:
    """Return the file with the larger rotary base that `alpha` stands for, at any length, instead of `alpha`."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf.fields.get(key)
        if isinstance(rope, dict) and rope.get("alpha") and rope.get("rope_type", rope.get("type")) == "dynamic":
            dim = hf.optional_integer("head_dim") or hf.integer("hidden_size") // hf.integer("num_attention_heads")
            named = HFConfig({**hf.fields, **rope}, source=f"{hf.source}: {key}")
            theta = named.number("rope_theta", 10000.0) * named.number("alpha") ** (dim / (dim - 2))
            return hf.changed({key: None, "rope_theta": theta})
    return hf
