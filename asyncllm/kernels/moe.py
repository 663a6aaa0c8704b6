"""Mixture of experts: routing, and the experts' gated MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.activation import silu_mul
from asyncllm.kernels.dispatch import op

__all__ = ["fused_experts", "route"]


@op("moe:route")
def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the top_k of them.

    logits [T, E] -> weights [T, k] float32, expert_ids [T, k] int64.

    The experts of a token are chosen by their logits, the highest first; of equal ones the lowest id comes first.
    renormalize makes the chosen weights of a token sum to 1.
    """
    logits = logits.float()
    expert_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(-1, expert_ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, expert_ids


@op("moe:fused_experts")
def fused_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """The weighted sum of each token's experts, each a SwiGLU MLP.

    x [T, H], gate_up [E, 2I, H] (gate rows first), down [E, H, I], weights [T, k] float32, expert_ids [T, k] int64
    -> [T, H] in x's dtype. Both products and the activation are rounded to x's dtype; the sum over experts is float32.
    A token's result depends on its own row only.
    """
    top_k = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
    outputs = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            hidden = silu_mul(rows[start : start + count] @ gate_up[expert].t())
            torch.mm(hidden, down[expert].t(), out=outputs[start : start + count])
            start += count
    chosen = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*expert_ids.shape, -1)
    return torch.einsum("tk,tkh->th", weights, chosen.float()).to(x.dtype)
