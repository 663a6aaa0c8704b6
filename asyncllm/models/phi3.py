"""Phi-3, Phi-3.5 and Phi-4: Mistral with fused projections, and longrope for extended contexts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.mistral import Mistral
from asyncllm.models.registry import register

__all__ = ["Phi3"]


@register(Phi3ForCausalLM="Phi-3 mini and medium, Phi-3.5-mini, Phi-4, Phi-4-mini")
class Phi3(Mistral):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.self_attn.qkv_proj": "layers.{i}.attn.qkv[q+k+v]",
            "model.layers.{i}.mlp.gate_up_proj": "layers.{i}.mlp.gate_up[gate+up]",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "phi3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=4096, norm_eps=1e-5, partial_rotary=1.0)
        if fields["rope"].kind not in ("default", "dynamic", "longrope"):
            hf.unsupported("rope_scaling", "Phi-3 has longrope ('longrope' or 'su') or none.")
        fields["windows"] = hf.windows(fields["num_layers"], hf.optional_integer("sliding_window"))
        return ModelConfig(**fields)
