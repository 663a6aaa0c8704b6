"""A model whose layers keep different things of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.layers.cache_spec import BlockPart, CacheSpec, PagedKVSpec

__all__ = ["LatentSpec", "Latents", "mixed_layout"]

BLOCK_SIZE = 4


class Latents(NamedTuple):
    """Codes of one byte, and a scale for each token."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class LatentSpec:
    """A vector of `width` bytes of each token, with a scale."""

    width: int
    window: int | None = None

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return BlockPart(1, (block_size, self.width), torch.uint8), BlockPart(1, (block_size, 1), torch.float32)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> Latents:
        return Latents(*tensors)


SPECS: list[CacheSpec] = [PagedKVSpec(2, 8), LatentSpec(6), PagedKVSpec(1, 8), LatentSpec(6), PagedKVSpec(2, 8, 16)]


def mixed_layout() -> CacheLayout:
    """Of five layers, among which three sizes."""
    return CacheLayout(SPECS, BLOCK_SIZE, torch.bfloat16)
