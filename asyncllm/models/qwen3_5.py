"""Qwen3.5: Qwen3-Next's layers with separate projections in the delta nets, and an MLP in each layer."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.qwen3_next import DELTA_WEIGHTS, Qwen3Next, Qwen3NextConfig, delta_fields
from asyncllm.models.registry import register

__all__ = ["APART", "Qwen35"]

_LINEAR = "model.layers.{i}.linear_attn"

APART = {
    f"{_LINEAR}.in_proj_qkv": "layers.{i}.attn.inputs[q+k+v]",
    f"{_LINEAR}.in_proj_z": "layers.{i}.attn.inputs[gate]",
    f"{_LINEAR}.in_proj_b": "layers.{i}.attn.weights[beta]",
    f"{_LINEAR}.in_proj_a": "layers.{i}.attn.weights[step]",
}
"""Rows of a weight table for the separate projections."""


@register(Qwen3_5ForCausalLM="Qwen3.5, dense: the text model")
class Qwen35(Qwen3Next):
    # Its layer that predicts further tokens is not loaded.
    weights = QWEN3_WEIGHTS.replaced({**DELTA_WEIGHTS, **APART}).skipping("mtp")
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-2,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=32768, head_dim=256, partial_rotary=0.25)
        return Qwen3NextConfig(**fields, **delta_fields(hf, fields["num_layers"]))
