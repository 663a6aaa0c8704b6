"""Latent attention to the tokens that an index chooses (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import UnsupportedFeature
from asyncllm.kernels import ChosenTokens, IndexedLatentKV, LatentKV
from asyncllm.layers.cache_spec import BlockPart, CacheSpec, LatentKVSpec
from asyncllm.layers.latent_attention import LatentAttention
from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.linear import Linear
from asyncllm.layers.moe import ExactRouter
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["IndexedLatentKVSpec", "SparseLatentAttention", "TokenIndex"]

KEY_NORM_EPS = 1e-6
"""Epsilon of the norm of index keys, regardless of rms_norm_eps."""


@dataclass(frozen=True, slots=True)
class IndexedLatentKVSpec:
    """Lines, and one index key per token of `key_dim` numbers, in the model's dtype: an `IndexedLatentKV`."""

    lines: LatentKVSpec
    key_dim: int

    @property
    def window(self) -> None:
        """None: a query may attend to any earlier token."""

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[BlockPart, ...]:
        return *self.lines.parts(block_size, dtype), BlockPart(1, (block_size, self.key_dim), dtype)

    def cache(self, tensors: Sequence[Tensor], block_size: int) -> IndexedLatentKV:
        *lines, keys = tensors
        return IndexedLatentKV(self.lines.cache(lines, block_size), keys[0])


class TokenIndex(Layer):
    """Scores all tokens for each query, as described in `kernels.token_index`. Whole on every rank, so that all ranks
    choose alike.

    The first features of queries and keys, as many as attention rotates, are rotated. Queries are made of attention's
    bottleneck of `q_rank` numbers, keys and weights of the layer's input.
    """

    def __init__(self, hidden_size: int, q_rank: int, *, num_heads: int, head_dim: int, interleaved: bool) -> None:
        super().__init__()
        self.q = Linear(q_rank, num_heads * head_dim, shard="replicated", unit=head_dim)
        self.k = Linear(hidden_size, head_dim, shard="replicated")
        self.k_norm = LayerNorm(head_dim, KEY_NORM_EPS)
        self.weights = ExactRouter(hidden_size, num_heads, shard="replicated")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.interleaved = interleaved

    def write(self, x: Tensor, step: StepInputs, cache: IndexedLatentKV) -> None:
        """Write the keys of the step's tokens, x [T, hidden]."""
        (rotation,) = step.rotations
        keys = self.k_norm(self.k(x, step))
        turned = kernels.apply_rotary(keys[:, None], rotation, interleaved=self.interleaved)[:, 0]
        kernels.fill_index_keys(turned, cache.keys, step.places)

    def choose(
        self,
        x: Tensor,
        compressed: Tensor,
        step: StepInputs,
        cache: IndexedLatentKV,
        contexts: Sequence[int],
        *,
        top_k: int,
    ) -> ChosenTokens:
        """Return what the step's tokens attend to, from x [T, hidden] and their bottlenecks [T, q_rank]."""
        (rotation,) = step.rotations
        if step.index_tiles is None:
            step.index_tiles = kernels.plan_index(
                step.block_tables,
                step.positions,
                step.q_offsets.diff().tolist() if step.prompts is None else _counts(step),
                contexts,
                block_size=cache.keys.shape[1],
                num_heads=self.num_heads,
                key_dim=self.head_dim,
            )
        q = self.q(compressed, step).unflatten(1, (self.num_heads, -1))
        turned = kernels.apply_rotary(q, rotation, interleaved=self.interleaved)
        return kernels.select_tokens(turned, self.weights(x, step), cache.keys, step.index_tiles, top_k=top_k)


class SparseLatentAttention(LatentAttention):
    """Each query attends to at most `top_k` tokens: those that the layer's index chooses, or that of the nearest
    earlier layer that has one.

    Steps without a longer context attend to all tokens, by the kernels of latent attention. Only these are captured,
    because how others are computed depends on the contexts.
    """

    def __init__(self, layer: int, hidden_size: int, *, top_k: int, index: TokenIndex | None, **sizes: Any) -> None:
        """`sizes`: those of `LatentAttention`."""
        super().__init__(layer, hidden_size, **sizes)
        self.index = index
        self.top_k = self.captured_context = top_k

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache of the layer's lines, and of its index keys if it has an index."""
        lines = self.lines_spec
        return lines if self.index is None else IndexedLatentKVSpec(lines, self.index.head_dim)

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """See `LatentAttention.forward`. Raises UnsupportedFeature for a step of long contexts that has not gone
        through the layer whose index this one shares."""
        step = step.of_layer(self.layer)
        cache: LatentKV | IndexedLatentKV = step.caches[self.layer]
        lines = cache.latents if isinstance(cache, IndexedLatentKV) else cache
        compressed = self._compressed(x, step)
        q = self._project(x, compressed, step, lines)
        if self.index is not None:
            assert isinstance(cache, IndexedLatentKV), "its spec says so"
            self.index.write(x, step, cache)
        contexts = self._long_contexts(step)
        if contexts is None:
            return self._output(*self._of_sampled(q, step, sampled), lines)
        if self.index is not None:
            assert isinstance(cache, IndexedLatentKV)
            step.chosen = self.index.choose(x, compressed, step, cache, contexts, top_k=self.top_k)
        chosen = step.chosen
        if chosen is None:
            raise UnsupportedFeature(
                f"Layer {self.layer} attends to the tokens that an earlier layer chooses, so on contexts longer than "
                f"{self.top_k} tokens it cannot run alone. Use shorter ones."
            )
        if sampled is not None:
            chosen = chosen.of_queries(sampled.indices)
        q, step = self._of_sampled(q, step, sampled)
        attended = kernels.chosen_latent_attention(
            self._absorbed(q), q[..., self.nope_dim :], lines, chosen, scale=self.scale
        )
        values = self.kv.method.product_by_head(self.kv, attended, slice(self.nope_dim, None))
        out: Tensor = self.out(values.flatten(1), step)
        return out

    def _long_contexts(self, step: StepInputs) -> Sequence[int] | None:
        """Return the number of tokens of each row's context, or None if none has more than `top_k`, as in every
        captured step."""
        contexts = step.contexts
        if contexts is None:
            if step.kv_lens.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            # Waits for the device; only the warm-up and parts of failed steps do not say how long contexts are.
            contexts = step.kv_lens.cpu().numpy()
        return contexts.tolist() if contexts.max() > self.top_k else None


def _counts(step: StepInputs) -> list[int]:
    """Return the number of tokens of each row, as the host knows them."""
    return [1] * step.num_decode + [count for count, _ in step.prompts or ()]
