"""Whatever a family is made of counts: without any one of it, the logits leave those of transformers by far.

The mechanisms are found in the model, so that a new family is held to all of its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from asyncllm.layers.block import Block, ParallelBlock, PostNormBlock
from asyncllm.layers.clipped_mlp import ClippedMLP
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.logit_corrected_moe import LogitCorrectedMoE
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.rotary import RotaryEmbedding
from asyncllm.layers.shortcut_block import IdentityMoE
from asyncllm.models.decoder import DecoderLM
from tests.models.parity import FAMILIES, TOKENS, Case, Runner, open_case, random_tokens, reference
from tests.remote_layouts import RELATIVES

CLEARLY_WRONG = 5e-3
"""50 times what test_parity.py allows."""

SLIGHTLY_WRONG = 3e-4
"""The two forms of GELU differ by up to 0.0005 of their input."""

Mechanism = tuple[str, Callable[[DecoderLM], None]]


def kinds_of_parameters(model: DecoderLM) -> Iterator[Mechanism]:
    """Biases are dropped, weights of norms are 1, by the kind: in all layers alike."""
    kinds = {re.sub(r"\.\d+\.", ".*.", name): parameter.ndim for name, parameter in model.named_parameters()}
    for kind, ndim in kinds.items():
        if (ndim > 1 and not kind.endswith("norm.weight")) or kind.endswith("correction.bias"):
            continue

        def flatten(model: DecoderLM, kind: str = kind) -> None:
            for name, parameter in model.named_parameters():
                if re.sub(r"\.\d+\.", ".*.", name) == kind:
                    parameter.fill_(0.0 if kind.endswith("bias") else 1.0)

        # The rows of a bias that keys add to all scores alike change nothing; those of queries do.
        yield f"no {kind}", flatten


def attributes(model: DecoderLM) -> Iterator[Mechanism]:
    """Settings of layers, each at what stands for none."""
    wrong: list[tuple[str, str, Any, Any]] = [
        ("attn", "window", None, None),
        ("attn", "window", None, lambda window: window and window + 1),
        ("attn", "chunk", None, 1024),
        ("attn", "chunk", None, lambda chunk: chunk and chunk - 16),
        ("attn", "softcap", None, None),
        ("attn", "qkv_clip", None, None),
        ("attn", "scale_queries", False, None),
        ("attn.qkv", "value_scale", None, 1.0),
        ("attn", "latent_scale", None, 1.0),
        ("attn", "log_decay", None, lambda decay: decay if decay is None else 2 * decay),
        ("layers", "attn_factors", None, (1.0, 1.0)),
        ("layers", "mlp_factors", None, (1.0, 1.0)),
        ("attn", "alibi", None, None),
        ("attn", "alibi", None, lambda slopes: slopes * 2),
        ("embed", "offset", None, lambda offset: 1 - min(offset, 1)),
        ("embed", "scale", None, None),
        ("head", "scale", None, None),
        ("head", "softcap", None, None),
        ("positions", "offset", None, lambda offset: 1 - min(offset, 1)),
    ]
    for place, name, absent, other in wrong:
        owners = owners_of(model, place)
        if all(getattr(owner, name, absent) is absent for owner in owners):
            continue

        def change(
            model: DecoderLM, place: str = place, name: str = name, absent: Any = absent, other: Any = other
        ) -> None:
            for owner in owners_of(model, place):
                setattr(owner, name, other(getattr(owner, name, absent)) if callable(other) else other)

        yield f"{place}.{name} {'changed' if callable(other) else 'dropped'}", change


def owners_of(model: DecoderLM, place: str) -> list[Any]:
    """The modules at a place: of each layer that has one, or of the model."""
    if place == "layers":
        return list(model.layers)
    if not place.startswith("attn"):
        return [getattr(model, place)]
    found = [layer.attn for layer in model.layers]
    return found if place == "attn" else [attn.qkv for attn in found if hasattr(attn, "qkv")]


def structure(model: DecoderLM) -> Iterator[Mechanism]:
    """What is between the layers."""

    def one_after_the_other(model: DecoderLM) -> None:
        for index, block in enumerate(model.layers):
            norm = block.attn_norm if block.mlp_norm is None else block.mlp_norm
            model.layers[index] = Block(attn_norm=block.attn_norm, attn=block.attn, mlp_norm=norm, mlp=block.mlp)

    def without_mean(model: DecoderLM) -> None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, LayerNorm):
                    norm = RMSNorm(len(child.weight), child.eps)
                    norm.weight = child.weight
                    setattr(module, name, norm)

    # A finished model has its parts as plain attributes too (`layers.layer.settle`).
    def without_positions(model: DecoderLM) -> None:
        vars(model).pop("positions", None)
        model.positions = None

    def without_embedding_norm(model: DecoderLM) -> None:
        vars(model).pop("embed_norm", None)
        model.embed_norm = None

    def swap_gate_and_up(model: DecoderLM) -> None:
        weight = model.layers[-1].mlp.gate_up.weight
        weight.copy_(weight.roll(weight.shape[-2] // 2, dims=-2).clone())

    def without_limits(model: DecoderLM) -> None:
        for module in model.modules():
            if isinstance(module, ClippedMLP):
                module.limit = 1e9

    if any(isinstance(module, ClippedMLP) for module in model.modules()):
        yield "no limits of MLPs", without_limits
    if "gate" in getattr(getattr(model.layers[-1].mlp, "gate_up", None), "rows", ()):
        yield "gate and up swapped", swap_gate_and_up
    if any(isinstance(block, ParallelBlock) for block in model.layers):
        yield "one branch after the other", one_after_the_other
    if isinstance(model.norm, LayerNorm):
        yield "norms that keep the mean", without_mean
    if model.positions is not None:
        yield "no learned positions", without_positions
    if model.embed_norm is not None:
        yield "no norm of embeddings", without_embedding_norm


def rotations(model: DecoderLM) -> Iterator[Mechanism]:
    rope = model.config.rope
    if rope is None:
        return

    def turned_by(**changes: Any) -> Callable[[DecoderLM], None]:
        def change(model: DecoderLM) -> None:
            turned = [msgspec.structs.replace(each, **changes) for each in model.config.ropes]
            model.rotaries = torch.nn.ModuleList(RotaryEmbedding(each, torch.device("cpu")) for each in turned)

        return change

    def pair_neighbours(model: DecoderLM) -> None:
        """As they are stored."""
        for block in model.layers:
            qkv = block.attn.qkv
            order = torch.arange(qkv.head_dim)
            order[: qkv.paired] = order[: qkv.paired].view(2, -1).t().flatten()
            for parameter in qkv.parameters():
                for part in ("q", "k"):
                    heads = parameter[qkv.rows[part]].view(-1, qkv.head_dim, *parameter.shape[1:])
                    parameter[qkv.rows[part]] = heads[:, order].flatten(0, 1)

    def turn_in_all_layers(model: DecoderLM) -> None:
        for block in model.layers:
            block.attn.rope = 0

    if rope.kind == "proportional" and not rope.rotated_pairs:
        yield "keys that are turned", turned_by(kind="default")
        return
    yield "another theta", turned_by(theta=2 * rope.theta)
    attention = model.layers[0].attn
    if hasattr(attention, "qkv"):
        if rope.dim < attention.head_dim:
            yield "heads turned whole", turned_by(dim=attention.head_dim)
        if model.config.paired_rotary:
            yield "halves that are neighbours", pair_neighbours
        if any(getattr(block.attn, "rope", 0) is None for block in model.layers):
            yield "every layer turned", turn_in_all_layers


def activations(model: DecoderLM) -> Iterator[Mechanism]:
    mlp = model.layers[0].mlp
    if not hasattr(mlp, "activation"):
        return
    others = {"silu", "gelu_tanh"} if model.config.gated else {"gelu", "gelu_tanh", "relu", "squared_relu"}
    for other in sorted(others - {mlp.activation}):

        def take(model: DecoderLM, other: str = other) -> None:
            for block in model.layers:
                if hasattr(block.mlp, "activation"):
                    block.mlp.activation = other

        yield f"activation {other}", take


def experts(model: DecoderLM) -> Iterator[Mechanism]:
    """How they are chosen and weighted, and what joins them."""
    found = [block.mlp for block in model.layers if isinstance(block.mlp, MoE)]
    if not found:
        return
    one, routing = found[0], found[0].routing

    def routed_by(**changes: Any) -> Callable[[DecoderLM], None]:
        return with_experts(routing=routing._replace(**changes))

    def with_experts(**changes: Any) -> Callable[[DecoderLM], None]:
        def change(model: DecoderLM) -> None:
            for block in model.layers:
                if isinstance(block.mlp, MoE):
                    for name, value in changes.items():
                        setattr(block.mlp, name, value)

        return change

    if routing.scores == "sparsemixer":
        yield "logits that are near", routed_by(near=0.0)
    elif not isinstance(model.layers[0], PostNormBlock):
        # A norm right behind the experts takes away what multiplies them all.
        yield "weights that add up, or do not", routed_by(renormalize=not routing.renormalize)
    if not isinstance(one, LogitCorrectedMoE):
        yield "other scores", routed_by(scores="softmax" if routing.scores == "sigmoid" else "sigmoid")
    if one.scaled_inputs:
        yield "weights of what experts give", with_experts(scaled_inputs=False)
    yield "fewer experts", routed_by(top_k=routing.top_k - 1)
    if routing.scale != 1:
        yield "weights of no scale", routed_by(scale=1.0)
    if routing.groups > 1:
        yield "no groups", routed_by(groups=1)
        yield "groups by another score", routed_by(group_score="max" if routing.group_score == "top2" else "top2")
    if isinstance(one, IdentityMoE):

        def compute_nothing(model: DecoderLM) -> None:
            for block in model.layers:
                block.mlp.routing = routing._replace(top_k=1)
                block.mlp.correction.bias[one.num_computing :] = float("-inf")

        yield "experts that compute nothing never chosen", compute_nothing
    if one.limit is not None:
        yield "SwiGLU", with_experts(limit=None)
        yield "another limit", with_experts(limit=2 * one.limit)
    for part in ("correction", "shared", "shared_gate"):
        if getattr(one, part) is not None:
            yield f"no {part}", with_experts(**{part: None})


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
def test_each_mechanism_counts(family: str) -> None:
    case, tokens = Case(family, "default"), random_tokens(1)
    expected = reference(case, tokens)

    def difference(change: Callable[[DecoderLM], None]) -> float:
        model = copy.deepcopy(open_case(case))
        with torch.no_grad():
            change(model)
        runner = Runner(model, block_size=16)
        row = runner.row(tokens)
        runner.step((row, TOKENS))
        return (row.result - expected).abs().max().item()

    def nothing(model: DecoderLM) -> None:
        pass

    assert difference(nothing) < 1e-4
    model = open_case(case)
    found = [
        mechanism
        for kind in (kinds_of_parameters, attributes, structure, rotations, activations, experts)
        for mechanism in kind(model)
    ]
    assert found
    blind = {}
    for name, change in found:
        moved = difference(change)
        if not moved > (SLIGHTLY_WRONG if "gelu" in name and "gelu" in model.config.activation else CLEARLY_WRONG):
            blind[name] = moved
    assert blind == {}
