"""How Ling's files, and Sarvam's, are written."""

from __future__ import annotations

from torch import nn

from tests.layout import Fields, Tensors, fused, renamed, unfused_experts

__all__ = ["WORDS", "rename", "unit_columns"]

WORDS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}


def rename(tensors: Tensors, fields: Fields) -> Tensors:
    return renamed(_NAMES)(unfused_experts(fused(tensors, "attention.query_key_value"), fields), fields)


def unit_columns(tensors: Tensors) -> Tensors:
    """Ling's head, which its code scales in the first step."""
    return {**tensors, "lm_head.weight": nn.functional.normalize(tensors["lm_head.weight"], dim=0)}
