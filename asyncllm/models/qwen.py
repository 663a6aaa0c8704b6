"""Qwen, the first generation: Qwen2 under other names, with its own scaling beyond `seq_length`: queries scaled by the
logarithm of their position, and rotary bases that grow with the prompt by powers of two."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.rotary import LogScaling
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.qwen2 import Qwen2
from asyncllm.models.registry import register
from asyncllm.models.typed_fields import MAX_POSITION
from asyncllm.models.weights import WeightMap

__all__ = ["Qwen"]

FIRST_WORDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
}
"""Names of entries in the first files -> names in later ones."""


@register(QWenLMHeadModel="Qwen 1.8B, 7B, 14B, 72B, the first generation")
class Qwen(Qwen2):
    weights = WeightMap(
        {
            "transformer.wte": "embed",
            "transformer.h.{i}.ln_1": "layers.{i}.attn_norm",
            "transformer.h.{i}.attn.c_attn": "layers.{i}.attn.qkv[q+k+v]",
            "transformer.h.{i}.attn.c_proj": "layers.{i}.attn.out",
            "transformer.h.{i}.ln_2": "layers.{i}.mlp_norm",
            "transformer.h.{i}.mlp.w2": "layers.{i}.mlp.gate_up[gate]",
            "transformer.h.{i}.mlp.w1": "layers.{i}.mlp.gate_up[up]",
            "transformer.h.{i}.mlp.c_proj": "layers.{i}.mlp.down",
            "transformer.ln_f": "norm",
            "lm_head": "head",
        }
    )
    base_prefix = "transformer."
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_channels": 24,
        "seq_length": 32,
        "max_position_embeddings": 128,
        "layer_norm_epsilon": 1e-5,
        "rotary_emb_base": 5000.0,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(FIRST_WORDS)
        hf.expect("no_bias", True)
        hf.expect("scale_attn_weights", True)
        hf.expect("rotary_pct", 1.0, 1)
        if hf.rope_scaling_factor:
            hf.unsupported("seq_length", "The positions of this model cannot be scaled: use rope_scaling_factor=0.")
        positions = hf.integer("max_position_embeddings", 8192, maximum=MAX_POSITION)
        trained = hf.integer("seq_length", positions, maximum=MAX_POSITION)
        grows = hf.flag("use_dynamic_ntk", True)
        fields = {
            "vocab_size": hf.fields.get("vocab_size"),
            "hidden_size": hf.integer("hidden_size"),
            # The projections gate and up each have half of it.
            "intermediate_size": hf.integer("intermediate_size", minimum=2) // 2,
            "num_hidden_layers": hf.fields.get("num_hidden_layers"),
            "num_attention_heads": hf.integer("num_attention_heads"),
            "head_dim": hf.optional_integer("kv_channels", 128),
            "max_position_embeddings": trained,
            "rms_norm_eps": hf.number("layer_norm_epsilon", 1e-6),
            "rope_theta": hf.number("rotary_emb_base", 10000.0),
            "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
            "dtype": _dtype(hf),
        }
        inner = HFConfig(fields, source=hf.source, session_len=hf.session_len)
        read = inner.decoder(architecture)
        if grows:
            read["rope"] = msgspec.structs.replace(read["rope"], kind="qwen", original_max_position=trained)
            read["max_position"] = max(trained, positions)
        scaled = hf.flag("use_logn_attn", True) and trained > 1
        return ModelConfig(**read, qkv_bias=True, query_scaling=LogScaling(length=trained) if scaled else None)


def _dtype(hf: HFConfig) -> Any:
    """Return the dtype of the weights, from flags if torch_dtype is absent."""
    named = hf.fields.get("dtype") or hf.fields.get("torch_dtype")
    flags = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return named or next((name for key, name in flags.items() if hf.flag(key, False)), None)
