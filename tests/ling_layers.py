"""Llama with the layers of Ling 2.5: latent attention and experts are DeepSeek-V3's, and lightning attention is written
out over all pairs of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.models.config import alibi_slopes
from tests.layout import Fields, Tensors, unfused_experts

__all__ = ["NATIVE", "rename", "take_layers"]

NATIVE: Fields = {"head_dim": 8, "num_key_value_heads": 6, "rope_interleave": True}
"""Llama rotates heads of this size, which are the rotated features of both kinds of attention."""


class _LightningAttention(nn.Module):
    """In the place of attention."""

    def __init__(self, fields: Any, layer: int) -> None:
        super().__init__()
        self.heads, self.size, self.groups, self.silu = 6, 16, fields.group_norm_size, fields.linear_silu
        inner = self.heads * self.size
        self.query_key_value = nn.Linear(fields.hidden_size, 3 * inner, bias=False)
        self.g_proj = nn.Linear(fields.hidden_size, inner, bias=False)
        self.query_layernorm, self.key_layernorm = (nn.RMSNorm(self.size, eps=1e-6) for _ in range(2))
        self.g_norm = nn.RMSNorm(inner, eps=1e-6)
        self.dense = nn.Linear(inner, fields.hidden_size, bias=False)
        factor = 1 - (layer - 1) / (fields.num_hidden_layers - 1) + 1e-5
        self.rates = factor * torch.tensor(alibi_slopes(self.heads))

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **more: object) -> tuple[Tensor, None]:
        from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

        mixed = self.query_key_value(hidden_states)
        mixed = nn.functional.silu(mixed) if self.silu else mixed
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
        q, k = apply_rotary_pos_emb(self.query_layernorm(q), self.key_layernorm(k), *position_embeddings)
        places = torch.arange(q.shape[2])
        left = (-self.rates[:, None, None] * (places[:, None] - places)).exp().tril()
        read = (q @ k.mT * self.size**-0.5 * left @ v).transpose(1, 2).flatten(2)
        grouped = nn.functional.rms_norm(
            read.unflatten(-1, (self.groups, -1)), (read.shape[-1] // self.groups,), eps=1e-6
        )
        return self.dense(grouped.flatten(2) * self.g_norm.weight * self.g_proj(hidden_states).sigmoid()), None


def take_layers(model: nn.Module) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3MoE

    fields: Any = model.config
    names = (
        *("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("num_attention_heads", "num_key_value_heads", "moe_intermediate_size", "n_group", "topk_group"),
        *("num_experts_per_tok", "routed_scaling_factor", "rope_interleave", "max_position_embeddings"),
    )
    config = DeepseekV3Config(
        n_routed_experts=fields.num_experts,
        n_shared_experts=fields.num_shared_experts,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        attn_implementation="eager",
        **{name: getattr(fields, name) for name in names},
    )
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for index, layer in enumerate(layers):
        attended = (index + 1) % fields.layer_group_size == 0
        layer.self_attn = DeepseekV3Attention(config, index) if attended else _LightningAttention(fields, index)
        if index >= fields.first_k_dense_replace:
            layer.mlp = DeepseekV3MoE(config)


def rename(tensors: Tensors, fields: Fields) -> Tensors:
    names = {
        "model.embed_tokens": "model.word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn": "attention",
        "e_score_correction_bias": "expert_bias",
    }
    renamed = {}
    for name, tensor in unfused_experts(tensors, fields).items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed
