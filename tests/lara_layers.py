"""Flint with the layers of Lara Mini."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.layout import Fields, Tensors

__all__ = ["NATIVE", "join_inputs", "stack_experts", "take_layers"]

NATIVE: Fields = {
    "intermediate_size": 32,
    "mlp_only_layers": [],
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
_DELTA_NETS = (0, 2)


class _DeltaNet(nn.Module):
    """In the place of attention."""

    def __init__(self, config: Any, layer: int) -> None:
        from transformers import Qwen3_5TextConfig
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        super().__init__()
        # Of its two forms that by chunks rounds more.
        modeling.torch_chunk_gated_delta_rule = modeling.torch_recurrent_gated_delta_rule  # type: ignore[attr-defined]
        names = ("hidden_size", "rms_norm_eps", *(name for name in vars(config) if name.startswith("linear_")))
        own = Qwen3_5TextConfig(
            num_hidden_layers=layer + 1,
            layer_types=["linear_attention"] * (layer + 1),
            **{name: getattr(config, name) for name in names},
        )
        self.net = modeling.Qwen3_5GatedDeltaNet(own, layer)

    def forward(self, hidden_states: Tensor, **more: object) -> tuple[Tensor, None]:
        return self.net(hidden_states), None


def _choose_by_softmax(router: Any) -> Any:
    def choose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
        weights, experts = torch.topk(logits.softmax(-1), router.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    return choose


def take_layers(model: nn.Module) -> None:
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        layer.mlp.gate.forward = _choose_by_softmax(layer.mlp.gate)
        if index in _DELTA_NETS:
            layer.self_attn = _DeltaNet(model.config, index)
        else:
            # A sink of no weight.
            heads = layer.self_attn.sinks.shape
            del layer.self_attn.sinks
            layer.self_attn.register_buffer("sinks", torch.full(heads, -1e9), persistent=False)


def stack_experts(tensors: Tensors) -> Tensors:
    """Flint's tensors as its class has them, with a head that is the embedding."""
    stacked = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for name, tensor in tensors.items():
        module, expert, projection = name.rpartition(".mlp.experts.")
        if not expert:
            stacked[name] = tensor
        elif projection == "0.down_proj.weight":
            for part, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                names = [[f"{module}.mlp.experts.{e}.{each}.weight" for each in projections] for e in range(4)]
                stacked[f"{module}.mlp.experts.{part}"] = torch.stack(
                    [torch.cat([tensors[each] for each in expert_names]) for expert_names in names]
                )
    return stacked


def join_inputs(tensors: Tensors, fields: Fields) -> Tensors:
    """The tensors as published: experts are stacked, and delta nets have one for all that their input determines."""
    joined = {}
    tensors = stack_experts(tensors)
    del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        if "in_proj_qkv" in name:
            parts = [tensors[name.replace("in_proj_qkv", f"in_proj_{each}")] for each in ("qkv", "z", "b", "a")]
            joined[name.replace("self_attn.net.in_proj_qkv", "linear_attn.in_proj")] = torch.cat(parts)
        elif ".in_proj_" not in name:
            new = name.replace("self_attn.net.norm", "linear_attn.out_norm").replace("self_attn.net", "linear_attn")
            joined[new] = tensor
    return joined
