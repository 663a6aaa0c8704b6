"""Experts of DeepSeek's families and many others: a token uses the best groups of experts, the choice has a correction,
and shared experts serve all tokens."""

from __future__ import annotations

from typing import Any, Literal

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig
from asyncllm.models.expert_rows import expert_rows, stacked_rows

__all__ = [
    "DEEPSEEK_EXPERTS",
    "check_groups",
    "expert_groups",
    "grouped_experts",
    "grouped_routing",
    "leading_dense",
    "sparse_layers",
]

DEEPSEEK_EXPERTS = {
    "model.layers.{i}.mlp.gate": "layers.{i}.mlp.router",
    **expert_rows("model.layers.{i}.mlp.experts"),
    **stacked_rows("model.layers.{i}.mlp.experts"),
    **{
        f"model.layers.{{i}}.mlp.shared_experts.{each}_proj": f"layers.{{i}}.mlp.shared.{target}"
        for each, target in (("gate", "gate_up[gate]"), ("up", "gate_up[up]"), ("down", "down"))
    },
}
"""Rows of a weight table for the router, the experts, and the shared experts."""


def grouped_experts(
    hf: HFConfig,
    num_layers: int,
    *,
    first: int,
    count: int,
    shared: int,
    size: int,
    routing: Routing,
    corrected: bool = False,
) -> ExpertsConfig:
    """Return experts in all layers from `first` on, with `shared` shared experts of the same `size`.

    Raises InvalidCheckpoint and UnsupportedModel for inconsistent settings.
    """
    hf.expect("moe_layer_freq", 1)
    hf.expect("mlp_bias", False)
    check_groups(hf, count, routing)
    return ExpertsConfig(
        layers=frozenset(range(first, num_layers)),
        count=count,
        size=size,
        routing=routing,
        corrected=corrected,
        exact_router=True,
        shared_size=shared * size,
    )


def grouped_routing(
    hf: HFConfig,
    scores: Literal["sigmoid", "softmax"] = "sigmoid",
    *,
    top_k: int | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Return how a token's experts are chosen: from the groups whose two best scores have the highest sum.

    The keywords are defaults for entries that the file lacks; without `top_k` the file has to have it. Raises
    InvalidCheckpoint.
    """
    return Routing(
        hf.integer("num_experts_per_tok") if top_k is None else hf.integer("num_experts_per_tok", top_k),
        scores=scores,
        renormalize=hf.flag("norm_topk_prob", renormalize),
        scale=hf.number("routed_scaling_factor", scale),
        group_score="top2",
        **expert_groups(hf, groups, top_groups),
    )


def check_groups(hf: HFConfig, count: int, routing: Routing) -> None:
    """Raise InvalidCheckpoint if the groups cannot be formed of so many experts, or have too few for a token."""
    if count > MAX_EXPERTS or count % routing.groups or count // routing.groups < 2:
        hf.invalid("n_routed_experts", f"where a number for {routing.groups} groups of two or more belongs")
    if routing.top_k > count // routing.groups * routing.top_groups:
        hf.invalid("num_experts_per_tok", f"more than {routing.top_groups} groups of {count // routing.groups} have")


def leading_dense(hf: HFConfig, num_layers: int, default: int) -> int:
    """Return how many layers, the first ones, have an MLP instead of experts. Raises InvalidCheckpoint."""
    kinds = hf.fields.get("mlp_layer_types")
    if kinds is None:
        return hf.integer("first_k_dense_replace", default, minimum=0)
    dense: int = kinds.count("dense") if isinstance(kinds, list) else -1
    if dense < 0 or kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        hf.invalid("mlp_layer_types", "where dense layers and then sparse ones belong, as many as there are")
    return dense


def sparse_layers(hf: HFConfig, num_layers: int) -> frozenset[int]:
    """Return the layers with experts: those that `mlp_layer_types` calls sparse, by default all but the first. Raises
    InvalidCheckpoint."""
    kinds = hf.fields.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {"dense", "sparse"}.issuperset(map(str, kinds)):
        hf.invalid("mlp_layer_types", f"where a list of {num_layers} kinds, dense or sparse, belongs")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def expert_groups(hf: HFConfig, groups: int = 1, top_groups: int = 1) -> dict[str, Any]:
    """Return the fields of a Routing for the number of groups, and how many of them a token's experts come from. Raises
    InvalidCheckpoint."""
    groups = hf.integer("n_group", groups, maximum=MAX_EXPERTS)
    return {"groups": groups, "top_groups": hf.integer("topk_group", min(top_groups, groups), maximum=groups)}
