"""Mixture of experts: routing, and the experts' gated MLPs."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import activate, clipped_silu_mul, gelu_tanh_mul, sigmoid, silu_mul
from asyncllm.kernels.dispatch import op

__all__ = ["Routing", "chosen_experts", "fused_experts", "fused_experts_invariant", "gate_of_experts", "route"]

GATE_SLOPE = 1.702
"""Slope of the gate with a limit: x * sigmoid(1.702 x) approximates GELU (Hendrycks and Gimpel, 2016)."""


class Routing(NamedTuple):
    """How a router's logits become experts and their weights; the same rule for all layers of a model."""

    top_k: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """softmax: over all experts. sigmoid: of each logit separately. sparsemixer: each choice is the highest remaining
    logit, weighted by a softmax over the logits near it (Liu et al., arXiv 2409.12136), without groups, corrections or
    renormalisation."""
    renormalize: bool = False
    """Whether the weights of the chosen experts sum to 1. For softmax scores, this is the softmax over the chosen
    logits."""
    scale: float = 1.0
    """Multiplies the weights, after they are renormalised."""
    groups: int = 1
    """Number of groups of neighbouring experts of equal size; experts are chosen only from the best groups."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """How groups are ranked: by their highest score (DeepSeek-V2), or by the sum of their two highest (DeepSeek-V3)."""
    near: float = 0.0
    """sparsemixer: a logit is near the highest one if it is below it by at most this fraction of the larger
    magnitude."""


@op("moe:route")
def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token, and weight them.

    logits [T, E], correction [E] float32 -> weights [T, k] float32, expert_ids [T, k] int64.

    Experts are chosen by their logits, or by score plus correction if there are corrections or groups; highest first,
    and the lowest id among equals. The weights are the scores without the correction.
    """
    logits = logits.float()
    if routing.scores == "sparsemixer":
        return _sparsemixer(logits, routing)
    scores = logits.softmax(-1) if routing.scores == "softmax" else sigmoid(logits)
    by = logits
    if correction is not None or routing.groups > 1:
        by = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = by.view(len(by), routing.groups, -1)
        best = grouped.topk(2, -1).values.sum(-1) if routing.group_score == "top2" else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _highest(best, routing.top_groups), True)
        by = grouped.masked_fill(~kept[..., None], float("-inf")).view_as(by)
    expert_ids = _highest(by, routing.top_k)
    weights = scores.gather(-1, expert_ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.scale, expert_ids


def _highest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest of values [..., N], highest first; the first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    remaining, choices, weights = logits, [], []
    for _ in range(routing.top_k):
        highest, choice = remaining.max(-1, keepdim=True)
        far = (highest - logits) / torch.maximum(logits.abs(), highest) > routing.near
        weights.append(remaining.masked_fill(far, float("-inf")).softmax(-1).gather(-1, choice))
        choices.append(choice)
        remaining = remaining.scatter(-1, choice, float("-inf"))
    return torch.cat(weights, -1) * routing.scale, torch.cat(choices, -1)


@op("moe:fused_experts")
def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    gelu: bool = False,
    num_chosen_from: int = 0,
) -> Tensor:
    """Return the weighted sum of each token's experts, each a gated MLP, or a plain one with squared ReLU.

    x [T, H]; gate_up [E, 2I, H] (gate rows first), or [E, I, H] for plain experts; down [E, H, I]; weights [T, k]
    float32; expert_ids [T, k] int64; gate_up_bias [E, 2I] and down_bias [E, H], both or neither -> [T, H] in x's dtype.
    An id of -1 stands for an expert on another rank, which has weight 0 and adds nothing; `num_chosen_from` is the
    number of experts including those, if it exceeds E, and does not change the result. The gate is SwiGLU; with a limit
    it is gpt-oss's: (up + 1) * gate * sigmoid(1.702 gate), with gate at most the limit and up within it on both sides;
    with a negative one, `clipped_silu_mul` of its absolute value; with `gelu` it is GELU in the tanh approximation.
    Both products and the activation are rounded to x's dtype; the sum over experts is float32. A token's result depends
    only on its own row.
    """
    top_k = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    start, *counts = (expert_ids.flatten() + 1).bincount(minlength=gate_up.shape[0] + 1).tolist()
    rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
    outputs = torch.zeros_like(rows)
    for expert, count in enumerate(counts):
        if count:
            product = F.linear(rows[start : start + count], gate_up[expert], _row(gate_up_bias, expert))
            hidden = gate_of_experts(product, down.shape[2], limit=limit, gelu=gelu)
            outputs[start : start + count] = F.linear(hidden, down[expert], _row(down_bias, expert))
            start += count
    chosen = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*expert_ids.shape, -1)
    return torch.einsum("tk,tkh->th", weights, chosen.float()).to(x.dtype)


def chosen_experts(expert_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts [C] that occur in expert_ids, ascending, and the place of each id among them; -1, which stands
    for experts on other ranks, stays -1."""
    chosen, places = torch.unique(expert_ids, return_inverse=True)
    elsewhere = int((chosen < 0).sum())
    return chosen[elsewhere:], places - elsewhere


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def gate_of_experts(x: Tensor, size: int, *, limit: float | None = None, gelu: bool = False) -> Tensor:
    """Return what the second product of experts reads [T, size], from their first product [T, 2 size], or [T, size] for
    plain experts. See `fused_experts`."""
    if x.shape[1] == size:
        return activate(x, "squared_relu")
    if gelu:
        return gelu_tanh_mul(x)
    if limit is None:
        return silu_mul(x)
    return _limited_mul(x, limit) if limit > 0 else clipped_silu_mul(x, -limit)


def _limited_mul(x: Tensor, limit: float) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * sigmoid(GATE_SLOPE * gate)).to(x.dtype)


@op("moe:fused_experts_invariant")
def fused_experts_invariant(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    gelu: bool = False,
    num_chosen_from: int = 0,
) -> Tensor:
    """`fused_experts`, with every row rounded to the same bits whatever other rows are in x."""
    rows = [slice(row, row + 1) for row in range(len(x))]
    results = (
        fused_experts(
            x[row],
            gate_up,
            down,
            weights[row],
            expert_ids[row],
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            limit=limit,
            gelu=gelu,
            num_chosen_from=num_chosen_from,
        )
        for row in rows
    )
    return torch.cat([x[:0], *results])
