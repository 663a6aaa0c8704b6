"""Llama with the layers of DeciLM's tiny file."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["shrink_layers"]


class _Instead(nn.Module):
    """In the place of Llama's attention or MLP: one product, or zeros."""

    def __init__(self, name: str, size: int, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        if name:
            self.add_module(name, nn.Linear(size, size, bias=False))

    def forward(self, hidden_states: Tensor, **more: object) -> Tensor | tuple[Tensor, None]:
        products = [product(hidden_states) for product in self.children()]
        out = products[0] if products else torch.zeros_like(hidden_states)
        return (out, None) if self.attends else out


def shrink_layers(model: nn.Module) -> None:
    """The layers of DeciLM's tiny file: KV heads, or one product, or nothing, and what the MLPs' factors make."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    for index, (heads, size) in enumerate(((2, 256), (None, 512), ("linear_attn", 256), (1, None), (4, "linear_mlp"))):
        layer: Any = model.model.layers[index]  # type: ignore[index, union-attr]
        own = copy.copy(model.config)
        if isinstance(heads, int):
            own.num_key_value_heads = heads
            layer.self_attn = LlamaAttention(own, index)
        else:
            layer.self_attn = _Instead(heads or "", own.hidden_size, attends=True)
            layer.input_layernorm = layer.input_layernorm if heads else nn.Identity()
        if isinstance(size, int):
            own.intermediate_size = size
            layer.mlp = LlamaMLP(own)
        else:
            layer.mlp = _Instead(size or "", own.hidden_size, attends=False)
            layer.post_attention_layernorm = layer.post_attention_layernorm if size else nn.Identity()
