"""Cache specs: a layer's declaration of its cache, from which pools, copies and swaps are derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncllm.kernels import LatentKV, PagedKV, States

__all__ = ["BlockPart", "CacheSpec", "LatentKVSpec", "PagedKVSpec", "StateSpec"]


class BlockPart(NamedTuple):
    """Tensors of one shape that a layer has in every block, such as keys and values, codes, or scales."""

    planes: int
    """Number of tensors."""
    shape: tuple[int, ...]
    """Shape of one tensor in one block."""
    dtype: torch.dtype


class CacheSpec(Protocol):
    """The contents of a layer's cache per block of tokens. Equal specs share memory and kernel plans."""

    @property
    def window(self) -> int | None:
        """How many of the latest positions a token sees, itself included; None: all of them."""

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        """Return the tensors of a block of `block_size` tokens; `dtype` is the model's."""

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> Any:
        """Return the layer's cache over these tensors, one contiguous tensor [planes, blocks, *shape] per part."""


@dataclass(frozen=True, slots=True)
class PagedKVSpec:
    """Keys and values of every token, by KV head, in the model's dtype: a `PagedKV`."""

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
    """One line per token for all heads, a latent and a rotated key, in the model's dtype: a `LatentKV`."""

    rank: int
    rope_dim: int

    @property
    def window(self) -> None:
        """None: a query sees its whole context."""

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return (BlockPart(1, (block_size, self.rank + self.rope_dim), dtype),)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> LatentKV:
        (pages,) = tensors
        return LatentKV(pages[0], self.rank)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state after a block's latest token, rather than an entry per token: `States` of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype | None, ...]
    """Dtype of each state; None: the model's."""

    @property
    def window(self) -> int:
        """2: a token needs only the state after the token before it."""
        return 2

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return tuple(BlockPart(1, shape, own or dtype) for shape, own in zip(self.shapes, self.dtypes, strict=True))

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> States:
        return States(tuple(tensor[0] for tensor in tensors), block_size)
