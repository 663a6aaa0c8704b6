"""What a layer keeps of the tokens that it has seen: the declaration from which pools, copies and swaps follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncllm.kernels import LatentKV, PagedKV, States

__all__ = ["BlockPart", "CacheSpec", "LatentKVSpec", "PagedKVSpec", "StateSpec"]


class BlockPart(NamedTuple):
    """Tensors of one shape that a layer has for every block: keys and values, say, or codes, or their scales."""

    planes: int
    """How many of them."""
    shape: tuple[int, ...]
    """Of one of them for one block."""
    dtype: torch.dtype


class CacheSpec(Protocol):
    """What a layer keeps of each block of tokens. Equal specs share memory and kernels' plans."""

    @property
    def window(self) -> int | None:
        """How many of the latest positions a token sees, itself included; None: all of them."""

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        """Return the tensors of a block of `block_size` tokens; `dtype` is the model's."""

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> Any:
        """Return what the layer reads and writes: over one tensor [planes, blocks, *shape] for each part,
        contiguous."""


@dataclass(frozen=True, slots=True)
class PagedKVSpec:
    """Keys and values of every token, by KV head, in the model's type: a `PagedKV`."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return (BlockPart(2, (self.num_kv_heads, block_size, self.head_dim), dtype),)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> PagedKV:
        (pages,) = tensors
        return PagedKV.over(pages)


@dataclass(frozen=True, slots=True)
class LatentKVSpec:
    """One line for all heads of every token, a latent and a rotated key, in the model's type: a `LatentKV`."""

    rank: int
    rope_dim: int

    @property
    def window(self) -> None:
        """A query sees its whole context."""

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return (BlockPart(1, (block_size, self.rank + self.rope_dim), dtype),)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> LatentKV:
        (pages,) = tensors
        return LatentKV(pages[0], self.rank)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state after a block's latest token, not a line of each: `States` of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype | None, ...]
    """None: the model's type."""

    @property
    def window(self) -> int:
        """A token needs no block but that of the one before it."""
        return 2

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return tuple(BlockPart(1, shape, own or dtype) for shape, own in zip(self.shapes, self.dtypes, strict=True))

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> States:
        return States(tuple(tensor[0] for tensor in tensors), block_size)
