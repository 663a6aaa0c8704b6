"""StableLM: Llama with layer norms and a part of each head rotated; 12B has head norms and parallel branches."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["StableLM"]


@register(
    StableLmForCausalLM="StableLM 3B, 2-1.6B, 2-12B, Zephyr", StableLMEpochForCausalLM="the first files of StableLM"
)
class StableLM(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            f"model.layers.{{i}}.self_attn.{each}_layernorm.norms.{{h}}": f"layers.{{i}}.attn.{each}_norm[{{h}}]"
            for each in ("q", "k")
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "stablelm",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(
            {"norm_eps": "rms_norm_eps", "layer_norm_eps": "rms_norm_eps", "rope_pct": "partial_rotary_factor"}
        )
        hf.expect("hidden_act", "silu")
        return ModelConfig(
            **hf.decoder(architecture, max_position=4096, norm_eps=1e-5, partial_rotary=0.25),
            qkv_bias=hf.flag("use_qkv_bias", False),
            qk_norm="listed" if hf.flag("qk_layernorm", False) else None,
            parallel_norms=1 if hf.flag("use_parallel_residual", False) else None,
        )
