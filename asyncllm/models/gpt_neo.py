"""GPT-Neo: GPT-2 with unscaled scores, no biases before attention, and windows in every other layer."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gpt2 import GPT2_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["GPTNeo"]

WORDS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""GPT-Neo's names of entries -> the usual names."""


@register(GPTNeoForCausalLM="GPT-Neo 125M, 1.3B, 2.7B, TinyStories")
class GPTNeo(DecoderLM):
    weights = (
        GPT2_WEIGHTS.without("transformer.h.{i}.attn.c_attn", "transformer.h.{i}.attn.c_proj")
        .replaced(
            {
                "transformer.h.{i}.attn.attention.q_proj": "layers.{i}.attn.qkv[q]",
                "transformer.h.{i}.attn.attention.k_proj": "layers.{i}.attn.qkv[k]",
                "transformer.h.{i}.attn.attention.v_proj": "layers.{i}.attn.qkv[v]",
                "transformer.h.{i}.attn.attention.out_proj": "layers.{i}.attn.out",
            }
        )
        .ignoring("transformer.h.{i}.attn.attention.bias", "transformer.h.{i}.attn.attention.masked_bias")
    )
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gpt_neo",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 256,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        inner = 4 * hf.integer("hidden_size")
        fields = hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=False, intermediate_size=inner)
        local, window = _local_layers(hf, fields["num_layers"]), hf.integer("window_size", 256)
        fields["windows"] = tuple(window if each else None for each in local)
        return ModelConfig(
            **fields,
            position_offset=0,
            out_bias=True,
            mlp_bias=True,
            score_scale=1.0,
            gated=False,
            activation=hf.activation("activation_function", "gelu_new"),
        )


def _local_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    """Return whether each layer has a window, from the list of their kinds, or pairs of kinds and repetitions."""
    kinds, key = hf.fields.get("attention_layers"), "attention_layers"
    if kinds is None:
        kinds, key = _expanded(hf, num_layers), "attention_types"
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("global", "local") for kind in kinds)
    ):
        hf.invalid(key, f"which do not name 'global' or 'local' for each of {num_layers} layers")
    return [kind == "local" for kind in kinds]


def _expanded(hf: HFConfig, num_layers: int) -> list[str]:
    kinds: list[str] = []
    try:
        for names, times in hf.fields.get("attention_types") or [[["global", "local"], num_layers // 2]]:
            kinds += [*names] * min(times, num_layers)
    except (TypeError, ValueError):
        hf.invalid("attention_types", "where pairs of a list of kinds and a number belong")
    return kinds
