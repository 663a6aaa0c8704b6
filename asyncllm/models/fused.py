"""Layouts of the parts of a layer in one checkpoint tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "STACKS", "Layout", "Stack"]


def _split_flat(tensor: Tensor, sizes: list[int], owner: Any) -> list[Tensor]:
    """Return parts that are concatenated along axis 0."""
    return list(torch.split(tensor, sizes))


def _split_grouped(tensor: Tensor, sizes: list[int], owner: Any) -> list[Tensor]:
    """Return q, k and v of a tensor that holds, per KV head, its query heads, its k and its v, along axis 0.

    InternLM2's wqkv and Falcon's query_key_value.
    """
    # One entry may hold several packed features.
    head = sizes[1] // owner.stored_kv_heads
    groups = tensor.reshape(owner.stored_kv_heads, -1, head, *tensor.shape[1:])
    return [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]


def _split_quarters(tensor: Tensor, sizes: list[int], owner: Any) -> list[Tensor]:
    """Return q, k and v of a tensor of four equal parts along axis 0, each with a quarter of the heads of q, then of v,
    then of k.

    CodeGen was trained on four devices.
    """
    quarters = tensor.reshape(4, 3, -1, *tensor.shape[1:])
    return [quarters[:, part].flatten(0, 1) for part in (0, 2, 1)]


def _split_by_head(tensor: Tensor, sizes: list[int], owner: Any) -> list[Tensor]:
    """Return the parts of a tensor that holds, per head, the head's share of each part, concatenated along axis 0
    (Qwen3-Next's queries and gates)."""
    return _split_shares(tensor, sizes, owner.stored_heads)


def _split_by_group(tensor: Tensor, sizes: list[int], owner: Any) -> list[Tensor]:
    """Return the parts of a tensor that holds, per group of heads, the group's share of each part, concatenated along
    axis 0 (MiMo-V2.5's q, k and v)."""
    return _split_shares(tensor, sizes, owner.stored_groups)


def _split_shares(tensor: Tensor, sizes: list[int], count: int) -> list[Tensor]:
    shares = tensor.reshape(count, -1, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in torch.split(shares, [size // count for size in sizes], 1)]


class Stack(NamedTuple):
    """The layout of all experts' weights [out, in] or biases [out], each with one part or several, in one tensor."""

    joined: bool = False
    """Whether the experts' axis and the next one are merged."""
    transposed: bool = False
    """Whether output features come last."""
    alternating: bool = False
    """Whether output features of the parts alternate instead of being concatenated."""

    def shape(self, experts: int, outputs: int, inner: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor. `outputs`: number of output features of all parts together."""
        first, *others = (*inner, outputs) if self.transposed else (outputs, *inner)
        return (experts * first, *others) if self.joined else (experts, first, *others)

    def split(self, tensor: Tensor, experts: int, sizes: list[int]) -> list[Tensor]:
        """Return the parts of the first expert, then those of the second and so on, with output features first."""
        stacked = tensor.view(experts, -1, *tensor.shape[1:]) if self.joined else tensor
        if self.transposed:
            stacked = stacked.movedim(-1, 1)
        if self.alternating:
            return [each[part :: len(sizes)] for each in stacked for part in range(len(sizes))]
        return [part for each in stacked for part in torch.split(each, sizes)]


STACKS: Mapping[str, Stack] = {
    "stacked": Stack(),
    "stacked_either": Stack(transposed=True),
    "stacked_alternating": Stack(alternating=True),
    "stacked_transposed": Stack(transposed=True),
    "stacked_pairs": Stack(transposed=True, alternating=True),
    "joined": Stack(joined=True),
    "joined_transposed": Stack(joined=True, transposed=True),
}
"""Layouts of all experts at once, by name. "stacked_either" means "stacked" if the tensor's shape fits that."""


class Layout(NamedTuple):
    """The layout of a layer's parts in one tensor."""

    split: Callable[[Tensor, list[int], Any], list[Tensor]]
    """Function of the tensor (output features first), the parts' sizes and the layer -> the parts."""
    pieces: Callable[[Any], int] = lambda owner: 1
    """Function of the layer -> the number of pieces in which the tensor has each part."""
    own_blocks: bool = False
    """Whether blocks of output features with one scale begin anew with each piece."""

    def blocks(self, features: int, size: int, owner: Any) -> int:
        """Return how many blocks of at most `size` the output features of all parts are."""
        pieces = self.pieces(owner) if self.own_blocks else 1
        return pieces * -(-features // pieces // size)

    def spread(self, blocks: Tensor, features: int, size: int, owner: Any) -> Tensor:
        """Return the entry of each output feature, from one entry per block along axis 0."""
        pieces = self.pieces(owner) if self.own_blocks else 1
        each = blocks.reshape(pieces, -1, *blocks.shape[1:]).repeat_interleave(size, 1)
        return each[:, : features // pieces].flatten(0, 1)


LAYOUTS: Mapping[str, Layout] = {
    "by_group": Layout(_split_by_group, lambda owner: int(owner.stored_groups), own_blocks=True),
    "by_head": Layout(_split_by_head, lambda owner: int(owner.stored_heads)),
    "flat": Layout(_split_flat),
    "grouped": Layout(_split_grouped, lambda owner: int(owner.stored_kv_heads)),
    "quarters": Layout(_split_quarters, lambda owner: 4),
    "transposed": Layout(_split_flat),
}
