"""Quantized caches: cache specs with fewer bits. Layers and models do not know of them; their ops take either kind."""

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
    """Keys and values of every token, by KV head, as codes with a range each: a `QuantizedKV`."""

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
    """Return the quantized version of a cache spec.

    States are few and stay unquantized. Raises UnsupportedFeature if there is no quantized version.
    """
    if isinstance(spec, StateSpec):
        return spec
    if isinstance(spec, ChunkedSpec):
        return replace(spec, inner=quantized(spec.inner, form))
    if not isinstance(spec, PagedKVSpec):
        raise UnsupportedFeature(
            "quant_policy: the model stores one latent per token for the keys and values of all heads, followed by a "
            "rotated key of a different range. It is already small, and an error in it would affect every head. Use "
            "quant_policy=0.",
            "quant_policy",
        )
    return QuantizedKVSpec(spec.num_kv_heads, spec.head_dim, form, spec.window)
