"""Quantized caches: what layers declare, in fewer bits. Layers and models know of none; their ops take either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncllm.errors import UnsupportedFeature
from asyncllm.kernels import KVFormat, QuantizedKV
from asyncllm.layers.cache_spec import BlockPart, CacheSpec, PagedKVSpec, StateSpec
from asyncllm.layers.chunked_attention import ChunkedSpec

__all__ = ["QuantizedKVSpec", "quantized"]


@dataclass(frozen=True, slots=True)
class QuantizedKVSpec:
    """Keys and values of every token, by KV head, in codes, and a range for each: a `QuantizedKV`."""

    num_kv_heads: int
    head_dim: int
    format: KVFormat
    window: int | None = None

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        tokens = (self.num_kv_heads, block_size)
        codes = BlockPart(self.format.planes, (*tokens, self.head_dim), self.format.keys.dtype)
        return codes, BlockPart(2, tokens, torch.int32)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> QuantizedKV:
        codes, ranges = tensors
        return QuantizedKV.over(codes, ranges, self.format)


def quantized(spec: CacheSpec, form: KVFormat) -> CacheSpec:
    """Return the cache that a layer has in the place of the one that it declares.

    States are few, and stay as they are. Raises UnsupportedFeature where there is no such cache.
    """
    if isinstance(spec, StateSpec):
        return spec
    if isinstance(spec, ChunkedSpec):
        return replace(spec, kept=quantized(spec.kept, form))
    if not isinstance(spec, PagedKVSpec):
        raise UnsupportedFeature(
            "quant_policy: the model keeps one latent per token for the keys and values of all heads, and a rotated "
            "key of another range behind it. It is small already, and each error in it would be one of every head. Use "
            "quant_policy=0.",
            "quant_policy",
        )
    return QuantizedKVSpec(spec.num_kv_heads, spec.head_dim, form, spec.window)
