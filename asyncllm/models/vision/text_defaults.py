"""Defaults of transformers' classes for `text_config`. Files that transformers wrote up to version 4.45 omit entries
that equal them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["TEXT_DEFAULTS"]


def _sizes(hidden: int, inner: int, layers: int, heads: int, vocab: int, **others: Any) -> Mapping[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **others,
    }


_QWEN_VL = _sizes(
    8192, 29568, 80, 64, 152064, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_position_embeddings=32768
)

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cohere2": _sizes(*(8192, 22528, 40, 64, 256000), rope_theta=10000.0, max_position_embeddings=8192),
    "exaone4": _sizes(4096, 16384, 32, 32, 102400, num_key_value_heads=32, rms_norm_eps=1e-5),
    "gemma3_text": _sizes(2304, 9216, 26, 8, 262208, num_key_value_heads=4, head_dim=256),
    "glm4v_moe_text": _sizes(
        *(4096, 10944, 46, 96, 151424),
        max_position_embeddings=65536,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        num_experts_per_tok=8,
    ),
    "glm4v_text": _sizes(
        4096, 13696, 40, 32, 151552, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=32768
    ),
    "glm_ocr_text": _sizes(1024, 4096, 16, 16, 59392, num_key_value_heads=8, rms_norm_eps=1e-5),
    "granite": _sizes(4096, 11008, 32, 32, 32000, max_position_embeddings=2048),
    "lfm2": _sizes(2560, 12288, 32, 32, 65536, num_key_value_heads=8, rope_theta=1e6, max_position_embeddings=128000),
    "llama": _sizes(4096, 11008, 32, 32, 32000, max_position_embeddings=2048),
    "mistral": _sizes(4096, 14336, 32, 32, 32000, num_key_value_heads=8, max_position_embeddings=131072),
    "paddleocr_vl_text": _sizes(
        *(1024, 3072, 18, 16, 103424),
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=131072,
    ),
    "qwen2": _sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32, max_position_embeddings=32768),
    "qwen2_5_omni_text": _sizes(
        *(3584, 18944, 28, 28, 152064),
        num_key_value_heads=4,
        rope_theta=1e6,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen3": _sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768),
    "qwen3_vl_text": _sizes(
        *(4096, 22016, 32, 32, 151936),
        num_key_value_heads=32,
        head_dim=128,
        rope_theta=500000.0,
        max_position_embeddings=128000,
    ),
}
"""Model type of a decoder -> its sizes, and those entries whose defaults differ from its family's."""
