"""Attention within chunks of the context (Llama 4): a query sees its chunk up to itself, and nothing before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import InvalidParameter
from asyncllm.kernels import DecodePlan, KVCache, PrefillPlan
from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.cache_spec import BlockPart, CacheSpec
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["ChunkedAttention", "ChunkedSpec"]


@dataclass(frozen=True, slots=True)
class ChunkedSpec:
    """The cache spec `inner`, whose tokens are no longer needed once their chunk of `chunk` tokens has ended."""

    inner: CacheSpec
    chunk: int

    @property
    def window(self) -> int:
        """The length of a chunk."""
        return self.chunk

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        """Return the parts of a block. Raises InvalidParameter unless chunks end at block ends."""
        if self.chunk % block_size:
            raise InvalidParameter(
                f"block_size is {block_size}, but the model attends within chunks of {self.chunk} tokens, each of "
                f"which must begin with a block. Choose a block_size that divides {self.chunk}.",
                "block_size",
            )
        return self.inner.parts(block_size, dtype)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> Any:
        return self.inner.cache(tensors, block_size)


class ChunkedAttention(Attention):
    """To the ops, every chunk is a row of its own whose block table begins at the chunk."""

    def __init__(self, layer: int, hidden_size: int, config: AttentionConfig, *, chunk: int) -> None:
        """`chunk`: length of a chunk in tokens."""
        super().__init__(layer, hidden_size, config)
        self.chunk = chunk
        self.kind = "chunk", chunk

    @property
    def cache_spec(self) -> CacheSpec:
        return ChunkedSpec(super().cache_spec, self.chunk)

    def _plan_decode(self, step: StepInputs, cache: KVCache, count: int) -> DecodePlan:
        lengths = step.kv_lens[:count]
        begins = (lengths - 1).clamp_(min=0).div(self.chunk, rounding_mode="floor").mul_(self.chunk)
        tables = self._tables(step.block_tables[:count], begins[:, None], cache)
        return kernels.plan_decode_attention(tables, lengths - begins, cache, num_heads=self.num_heads)

    def _plan_prefill(self, step: StepInputs, cache: KVCache, first: int) -> PrefillPlan:
        """Return the plan with the maximum number of chunks for each row. Chunks beyond a row's last one are rows
        without queries."""
        lengths, offsets = step.kv_lens[first:, None], step.q_offsets[first:]
        counts = offsets.diff()[:, None]
        starts = (lengths - counts).clamp_(min=0)
        max_chunks = 1 + (step.max_q_len + self.chunk - 2) // self.chunk
        chunks = starts.div(self.chunk, rounding_mode="floor") + torch.arange(
            max_chunks, dtype=starts.dtype, device=starts.device
        )
        begins = chunks * self.chunk
        queries = torch.minimum((begins - starts).clamp_(min=0), counts)
        return kernels.plan_prefill_attention(
            self._tables(step.block_tables[first:], begins, cache),
            torch.cat([(offsets[:-1, None] + queries).flatten(), offsets[-1:]]),
            (lengths - begins).clamp_(min=0, max=self.chunk).flatten(),
            cache,
            num_heads=self.num_heads,
            max_q_len=min(step.max_q_len, self.chunk),
            invariant=step.batch_invariant,
        )

    def _tables(self, block_tables: Tensor, begins: Tensor, cache: KVCache) -> Tensor:
        """block_tables [B, N], begins [B, C] -> block tables of the chunks that begin there [B * C, M]."""
        block_size = cache.k.shape[2]
        blocks = torch.arange(min(self.chunk // block_size, block_tables.shape[1]), device=begins.device)
        places = (begins.long().div(block_size, rounding_mode="floor")[..., None] + blocks).flatten(1)
        return block_tables.gather(1, places.clamp_(max=block_tables.shape[1] - 1)).view(-1, len(blocks))
