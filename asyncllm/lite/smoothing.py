"""Find the scales of a layer that can move from a projection's inputs to the module that produces them, and move them.

The pairs follow from the kinds of blocks, attention and MLPs, and hold for every family that is built from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.layers.alternating_updates import AltUp
from asyncllm.layers.attention import Attention
from asyncllm.layers.block import AnyBlock, ParallelBlock, PostNormBlock, SingleBlock, StreamNormBlock
from asyncllm.layers.clipped_mlp import ClippedMLP
from asyncllm.layers.delta_net import GatedDeltaNet
from asyncllm.layers.gated_attention import HeadGatedAttention
from asyncllm.layers.joint_mixers import JointMixers
from asyncllm.layers.latent_attention import GatedLatentAttention, LatentAttention
from asyncllm.layers.linear_method import Weighted, of_expert
from asyncllm.layers.mamba2 import GroupedNorm, Mamba2
from asyncllm.layers.mlp import GatedMLP, PlainMLP
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import Norm
from asyncllm.layers.normed_experts import NormedMoE, NormedRouter
from asyncllm.layers.plain_moe import PlainMoE
from asyncllm.layers.shared_keys import BorrowingAttention, NormedValueAttention
from asyncllm.layers.short_convolution import ShortConvolution, StateLayer
from asyncllm.layers.shortcut_block import ShortcutBlock
from asyncllm.layers.sparse_latent_attention import SparseLatentAttention, TokenIndex

__all__ = ["AnyNorm", "Group", "Masters", "Matrix", "Rows", "groups", "plain_layers"]

AnyNorm = Norm | GroupedNorm


class Matrix(NamedTuple):
    """The weight of a layer or of one of its experts."""

    layer: Weighted
    expert: int | None = None


class Rows(NamedTuple):
    """Output features of a matrix that serve only as inputs of others."""

    matrix: Matrix
    rows: Tensor
    """int64 [C]"""


@dataclass(frozen=True)
class Group:
    """C features that can be divided by scales where they are produced, if the weights that read them are multiplied by
    the same scales."""

    producer: AnyNorm | Rows
    consumers: tuple[Matrix, ...]
    spread: Tensor | None = None
    """int64 [K]: the feature at each input of the consumers; None: input i is feature i."""

    @property
    def size(self) -> int:
        """The number of features, C."""
        return len(self.producer.rows) if isinstance(self.producer, Rows) else self.producer.weight.shape[-1]

    def at_inputs(self, scales: Tensor) -> Tensor:
        """Expand scales [C] to the consumers' inputs [K]."""
        return scales if self.spread is None else scales[self.spread]

    def of_features(self, values: Tensor) -> Tensor:
        """Return the means of values [K] by feature [C]."""
        if self.spread is None:
            return values
        spread = self.spread.to(values.device)
        sums = values.new_zeros(self.size).index_add_(0, spread, values)
        return sums / spread.bincount(minlength=self.size)


class Masters:
    """Float32 copies of a layer's weights, which are changed and written back."""

    def __init__(self, block: nn.Module) -> None:
        self._layers = [each for each in block.modules() if isinstance(each, Weighted)]
        self._weights = {id(layer): layer.weight.detach().float().clone() for layer in self._layers}
        self._biases = {
            id(layer): layer.bias.detach().float().clone() for layer in self._layers if layer.bias is not None
        }
        self.changed: set[int] = set()
        """Ids of the modules that differ from the checkpoint."""

    def weight(self, matrix: Matrix) -> Tensor:
        """Return the float32 copy itself, [N, K]."""
        return of_expert(self._weights[id(matrix.layer)], matrix.expert)

    def bias(self, matrix: Matrix) -> Tensor | None:
        """Return the float32 copy itself, [N], or None without a bias."""
        bias = self._biases.get(id(matrix.layer))
        return None if bias is None else of_expert(bias, matrix.expert)

    def write_back(self) -> None:
        """Copy the float32 weights back to the layers."""
        for layer in self._layers:
            layer.weight.copy_(self._weights[id(layer)])
            if layer.bias is not None:
                layer.bias.copy_(self._biases[id(layer)])

    def move(self, group: Group, scales: Tensor, stored: torch.dtype) -> Tensor:
        """Divide the group's features by scales [C] where they are produced, multiply where they are read, and return
        the scales used. A norm is rounded to the file's dtype `stored`, and the consumers compensate for that."""
        if not isinstance(group.producer, Rows):
            scales = _divide_norm(group.producer, scales, stored)
            self.changed.add(id(group.producer))
        else:
            matrix, rows = group.producer
            self.weight(matrix)[rows] /= scales[:, None]
            bias = self.bias(matrix)
            if bias is not None:
                bias[rows] /= scales
            self.changed.add(id(matrix.layer))
        for consumer in group.consumers:
            self.weight(consumer).mul_(group.at_inputs(scales))
            self.changed.add(id(consumer.layer))
        return scales


def _divide_norm(norm: AnyNorm, scales: Tensor, stored: torch.dtype) -> Tensor:
    before, less = norm.weight.detach().float(), norm.stored_less
    after = (before / scales - less).to(stored).float() + less
    scales = torch.where((before == 0) | (after == 0), torch.ones_like(before), before / after)
    norm.weight.copy_(before / scales)
    bias = getattr(norm, "bias", None)
    if bias is not None:
        bias.copy_((bias.float() / scales).to(stored))
    return scales


def plain_layers(block: AnyBlock) -> list[Weighted]:
    """Return the layers with a weight that stay unquantized: those that select and weight experts or mix streams, and
    those that a layer with a state declares."""
    found: list[Weighted] = []
    for module in block.modules():
        if isinstance(module, MoE):
            found.append(_router(module))
            if module.shared_gate is not None:
                found.append(module.shared_gate)
        elif isinstance(module, StateLayer):
            found += [_projection(module, name) for name in module.unquantized]
        elif isinstance(module, TokenIndex):
            found.append(module.weights)
        elif isinstance(module, AltUp):
            found += [module.router, module.prediction, module.correction]
    return found


def groups(block: AnyBlock) -> Iterator[Group]:
    """Yield the groups of a block, from the input to the output of each branch."""
    yield from _after_norms(block)
    for module in block.modules():
        yield from _within_attention(module)
        yield from _within_mlp(module)


def _after_norms(block: AnyBlock) -> Iterator[Group]:
    """Yield the groups of features that a block's norms produce."""
    of_attention, of_mlp = _attention_consumers(block.attn), _mlp_consumers(block.mlp)
    if isinstance(block, ShortcutBlock):
        # Some experts return the other norm's features themselves.
        yield from _after_norm(block.attn_norm, of_attention)
        yield from _after_norms(block.second)
    elif isinstance(block, SingleBlock):
        yield from _after_norm(block.norm, of_attention + of_mlp)
    elif isinstance(block, ParallelBlock) and block.mlp_norm is None:
        yield from _after_norm(block.attn_norm, of_attention + of_mlp)
    elif not isinstance(block, PostNormBlock | StreamNormBlock):
        yield from _after_norm(block.attn_norm, of_attention)
        if block.mlp_norm is not None:
            yield from _after_norm(block.mlp_norm, of_mlp)


def _after_norm(norm: Norm, consumers: tuple[Matrix, ...]) -> Iterator[Group]:
    """Yield the features that a norm produces, unless it has no weight to divide, or nothing known reads them."""
    if consumers and next(norm.parameters(), None) is not None:
        yield Group(norm, consumers)


def _attention_consumers(attention: nn.Module | None) -> tuple[Matrix, ...]:
    match attention:
        case JointMixers():
            return _attention_consumers(attention.attention) + _attention_consumers(attention.state)
        case StateLayer():
            return tuple(Matrix(_projection(attention, name)) for name in attention.first_products)
        case LatentAttention():
            index = attention.index if isinstance(attention, SparseLatentAttention) else None
            more = () if index is None else (Matrix(index.k), Matrix(index.weights))
            if isinstance(attention, GatedLatentAttention):
                more = (*more, Matrix(attention.gate))
            q = attention.q if attention.q_down is None else attention.q_down
            return (Matrix(q), Matrix(attention.kv_down), *more)
        case HeadGatedAttention():
            return (Matrix(attention.qkv), Matrix(attention.gate))
        case Attention():
            return (Matrix(attention.qkv),)
        case _:
            return ()


def _mlp_consumers(mlp: nn.Module | None) -> tuple[Matrix, ...]:
    match mlp:
        case GatedMLP():
            return (Matrix(mlp.gate_up),)
        case PlainMLP():
            return (Matrix(mlp.up),)
        case MoE():
            shared = () if mlp.shared is None else _mlp_consumers(mlp.shared)
            gate = () if mlp.shared_gate is None else (Matrix(mlp.shared_gate),)
            return (Matrix(_router(mlp)), *_expert_consumers(mlp), *shared, *gate)
        case _:
            return ()


def _expert_consumers(moe: MoE) -> tuple[Matrix, ...]:
    if isinstance(moe, PlainMoE) and moe.into is not None:
        return (Matrix(moe.into),)
    return tuple(Matrix(moe.gate_up, expert) for expert in range(moe.gate_up.num_experts or 0))


def _router(moe: MoE) -> Weighted:
    router: Weighted | NormedRouter = moe.router
    return router.proj if isinstance(router, NormedRouter) else router


def _projection(layer: StateLayer, name: str) -> Weighted:
    projection: Weighted = getattr(layer, name)
    return projection


def _within_attention(attention: nn.Module) -> Iterator[Group]:
    """Yield the values, which are summed up by weights that do not depend on them, unless clipped or normed, and what
    the last product of a layer with a state reads, if a norm or a projection produces it."""
    if isinstance(attention, ShortConvolution):
        size = attention.out.in_features
        yield Group(Rows(Matrix(attention.gates), torch.arange(size, 2 * size)), (Matrix(attention.out),))
    elif isinstance(attention, GatedDeltaNet):
        spread = torch.arange(attention.out.in_features) % attention.head_dim
        yield Group(attention.norm, (Matrix(attention.out),), spread)
    elif isinstance(attention, Mamba2):
        if isinstance(attention.norm, GroupedNorm):
            yield Group(attention.norm, (Matrix(attention.out),))
    elif isinstance(attention, LatentAttention):
        if attention.q_norm is not None:
            index = attention.index if isinstance(attention, SparseLatentAttention) else None
            more = () if index is None else (Matrix(index.q),)
            yield Group(attention.q_norm, (Matrix(attention.q), *more))
        heads = torch.arange(attention.kv.out_features).view(attention.num_heads, -1)
        yield Group(Rows(Matrix(attention.kv), heads[:, attention.nope_dim :].flatten()), (Matrix(attention.out),))
    elif isinstance(attention, NormedValueAttention | BorrowingAttention):
        return
    elif isinstance(attention, Attention) and attention.qkv_clip is None:
        values = attention.qkv.rows["v"]
        rows = torch.arange(values.start, values.stop)
        heads = torch.arange(len(rows)).view(attention.num_kv_heads, -1)
        spread = heads.repeat_interleave(attention.num_heads // attention.num_kv_heads, 0).flatten()
        yield Group(Rows(Matrix(attention.qkv), rows), (Matrix(attention.out),), spread)


def _within_mlp(mlp: nn.Module) -> Iterator[Group]:
    """Yield the features that the gate multiplies, which is linear unless it is limited, and what the norm of experts
    produces. A plain MLP has its activation in between."""
    if isinstance(mlp, NormedMoE):
        yield from _after_norm(mlp.input_norm, _expert_consumers(mlp))
    if not isinstance(mlp, GatedMLP | MoE) or isinstance(mlp, ClippedMLP | PlainMoE):
        return
    if isinstance(mlp, MoE) and mlp.limit is not None:
        return
    up = mlp.gate_up.rows["up"]
    rows = torch.arange(up.start, up.stop)
    for expert in (None,) if mlp.gate_up.num_experts is None else range(mlp.gate_up.num_experts):
        yield Group(Rows(Matrix(mlp.gate_up, expert), rows), (Matrix(mlp.down, expert),))
