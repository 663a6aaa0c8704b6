"""Code World Model: Llama with a sliding window in all layers but every fourth."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["CodeWorldModel"]


@register(CwmForCausalLM="Code World Model 32B")
class CodeWorldModel(DecoderLM):
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "cwm",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf = hf.with_llama3_rope(16.0)
        fields = hf.decoder(architecture, max_position=131072, theta=1e6, norm_eps=1e-5, head_dim=128)
        num_layers, window = fields["num_layers"], hf.optional_integer("sliding_window", 8192)
        fields["windows"] = hf.windows(num_layers, window, [layer % 4 != 0 for layer in range(num_layers)])
        return ModelConfig(**fields, mlp_bias=hf.flag("mlp_bias", False))
