"""Qwen1.5, Qwen2 and Qwen2.5, dense: Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Qwen2", "qwen_windows"]


def qwen_windows(hf: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of any Qwen family: none unless use_sliding_window, and then only from layer max_window_layers
    on."""
    sliding_window = hf.optional_integer("sliding_window", 4096)
    if not hf.flag("use_sliding_window", False) or sliding_window is None:
        # The files of models with full attention name a window too, but no sliding layer in their layer_types.
        return hf.windows(num_layers, None, [False] * num_layers)
    first = hf.integer("max_window_layers", 28, minimum=0)
    return hf.windows(num_layers, sliding_window, [layer >= first for layer in range(num_layers)])


@register(Qwen2ForCausalLM="Qwen1.5, Qwen2, Qwen2.5, QwQ", MiMoForCausalLM="MiMo 7B")
class Qwen2(DecoderLM):
    # MiMo's additional layers predict tokens beyond the next one.
    weights = LLAMA_WEIGHTS.skipping("model.mtp_layers.{i}")
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", True)
        fields = hf.decoder(architecture, max_position=32768)
        fields["windows"] = qwen_windows(hf, fields["num_layers"])
        return ModelConfig(**fields, qkv_bias=True)
