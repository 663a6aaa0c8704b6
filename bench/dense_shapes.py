"""Shapes of dense models for shapes.py, and the tensors of those that are named in other ways than Llama's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["DENSE_SHAPES", "dense_tensors"]

DENSE_SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "phi-3-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "bias": False,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
    },
}


def dense_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float | None]] | None:
    """Return the name, the shape and the constant, if any, of every tensor of Gemma 2, Phi-3 or Falcon 7B; None for
    other models."""
    known = {"Gemma2ForCausalLM": _gemma2, "Phi3ForCausalLM": _phi3, "FalconForCausalLM": _falcon}
    make = known.get(config["architectures"][0])
    return None if make is None else make(config)


def _gemma2(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), None
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        # Norms store what their factors are above 1.
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}.{name}_layernorm.weight", (hidden,), 0.0
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden), None
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries), None
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (inner, hidden), None
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner), None
    yield "model.norm.weight", (hidden,), 0.0


def _phi3(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), None
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), 1.0
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 1.0
        yield f"{prefix}.self_attn.qkv_proj.weight", (hidden + 2 * keys, hidden), None
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden), None
        yield f"{prefix}.mlp.gate_up_proj.weight", (2 * inner, hidden), None
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner), None
    yield "model.norm.weight", (hidden,), 1.0
    yield "lm_head.weight", (config["vocab_size"], hidden), None


def _falcon(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    yield "transformer.word_embeddings.weight", (config["vocab_size"], hidden), None
    norms = [f"transformer.h.{layer}.input_layernorm" for layer in range(config["num_hidden_layers"])]
    for norm in (*norms, "transformer.ln_f"):
        yield f"{norm}.weight", (hidden,), 1.0
        yield f"{norm}.bias", (hidden,), 0.0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"transformer.h.{layer}"
        yield f"{prefix}.self_attention.query_key_value.weight", ((heads + 2) * hidden // heads, hidden), None
        yield f"{prefix}.self_attention.dense.weight", (hidden, hidden), None
        yield f"{prefix}.mlp.dense_h_to_4h.weight", (4 * hidden, hidden), None
        yield f"{prefix}.mlp.dense_4h_to_h.weight", (hidden, 4 * hidden), None
