"""Multi-head latent attention: keys and values of all heads are linear maps of one cached latent per token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import DecodePlan, LatentKV, PrefillPlan
from asyncllm.layers.cache_spec import CacheSpec, LatentKVSpec
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["GatedLatentAttention", "LatentAttention"]

EXPANDED_BYTES = 2**29
"""Maximum memory for expanded keys and values of prompts: contexts of 65,536 tokens at 16 heads of 256 16-bit
numbers."""

NORM_EPS = 1e-6
"""Epsilon of the norms of latents, regardless of rms_norm_eps."""


class LatentAttention(Layer):
    """x [T, hidden] -> [T, hidden]. First writes the tokens' lines to the cache of layer `layer`.

    A head's query and key have `nope_dim` unrotated and `rope_dim` rotated features; its value has `value_dim`. Latents
    have `kv_rank` numbers. With `q_rank`, queries go through a normed bottleneck of that rank. `bias` applies to the
    products with x and to the output; `scale_queries` multiplies queries by the step's `query_scale`.
    """

    context_bytes = EXPANDED_BYTES

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        interleaved: bool,
        bias: bool = False,
        scale_queries: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        head_dim = nope_dim + rope_dim
        self.q_down = None if q_rank is None else Linear(hidden_size, q_rank, shard="replicated", bias=bias)
        self.q_norm = None if q_rank is None else RMSNorm(q_rank, NORM_EPS)
        self.q = Linear(hidden_size if q_rank is None else q_rank, num_heads * head_dim, shard="column", unit=head_dim)
        self.kv_down = Linear(hidden_size, kv_rank + rope_dim, shard="replicated", bias=bias)
        self.kv_norm = RMSNorm(kv_rank, NORM_EPS)
        # A head's key features, then its value features. Absorbed products cannot have adapters.
        self.kv = Weighted(kv_rank, num_heads * (nope_dim + value_dim), shard="column", unit=nope_dim + value_dim)
        self.out = Linear(num_heads * value_dim, hidden_size, shard="row", unit=value_dim, bias=bias)
        self.num_heads = num_heads
        self.kv_rank = kv_rank
        self.nope_dim = nope_dim
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        self.scale = scale
        self.interleaved = interleaved
        self.scale_queries = scale_queries

    def divide(self, group: RankGroup) -> None:
        self.num_heads = self.q.out_features // (self.nope_dim + self.rope_dim)

    @property
    def cache_spec(self) -> CacheSpec:
        """The layer's cache."""
        return self.lines_spec

    @property
    def lines_spec(self) -> LatentKVSpec:
        """The cache of the layer's lines. Layers with equal ones share their plans."""
        return LatentKVSpec(self.kv_rank, self.rope_dim)

    @property
    def latent_weight(self) -> Tensor:
        """The weight of the latents' norm [kv_rank]."""
        weight: Tensor = self.kv_norm.weight
        return weight

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: attend for these rows only -> [R, hidden]; the lines of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: LatentKV = step.caches[self.layer]
        q = self._project(x, self._compressed(x, step), step, cache)
        return self._output(*self._of_sampled(q, step, sampled), cache)

    def _compressed(self, x: Tensor, step: StepInputs) -> Tensor:
        """Return what queries are made of: the bottleneck [T, q_rank], or x without one."""
        compressed: Tensor = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x, step))
        return compressed

    def _of_sampled(self, q: Tensor, step: StepInputs, sampled: SampledRows | None) -> tuple[Tensor, StepInputs]:
        """Return the queries and the step of the sampled rows; by default, of all."""
        if sampled is None:
            return q, step
        rows = kernels.gather_rows(q.flatten(1), sampled.indices).view(-1, *q.shape[1:])
        return rows, sampled.inputs.of_layer(self.layer)

    def _output(self, q: Tensor, step: StepInputs, cache: LatentKV) -> Tensor:
        """Return the layer's output [T, hidden] for queries q [T, H, nope + rope]."""
        out: Tensor = self.out(self._attend(q, step, cache).flatten(1), step)
        return out

    def _project(self, x: Tensor, compressed: Tensor, step: StepInputs, cache: LatentKV) -> Tensor:
        """Write the tokens' lines, and return their queries [T, H, nope + rope]."""
        (rotation,) = step.rotations
        q: Tensor = self.q(compressed, step).unflatten(1, (self.num_heads, -1))
        kernels.rope_fill_latent(
            q,
            self.kv_down(x, step),
            rotation,
            cache,
            step.places,
            norm=self.latent_weight,
            eps=self.kv_norm.eps,
            interleaved=self.interleaved,
        )
        if self.scale_queries:
            assert step.query_scale is not None, "the model writes it before its first layer"
            q = (q * step.query_scale).to(q.dtype)
        return q

    def _attend(self, q: Tensor, step: StepInputs, cache: LatentKV) -> Tensor:
        """q [T, H, nope + rope] -> [T, H, value], new and contiguous."""
        if self._expands(q, step):
            return self._attend_expanded(q, step, cache)
        decode, prefill = self._plans(step, cache)
        return self._attend_absorbed(q, cache, decode, prefill)

    def _attend_absorbed(
        self,
        q: Tensor,
        cache: LatentKV,
        decode: DecodePlan | None,
        prefill: PrefillPlan | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend over the lines, without expanding them."""
        q_latent, q_rope = self._absorbed(q), q[..., self.nope_dim :]
        attended = None
        if decode is not None:
            attended = kernels.latent_decode_attention(q_latent, q_rope, cache, decode, scale=self.scale)
        if prefill is not None:
            attended = kernels.latent_prefill_attention(
                q_latent, q_rope, cache, prefill, scale=self.scale, out=attended
            )
        assert attended is not None
        return self.kv.method.product_by_head(self.kv, attended, slice(self.nope_dim, None), out=out)

    def _absorbed(self, q: Tensor) -> Tensor:
        """q [T, H, nope + rope] -> its unrotated part times the transposed key map [T, H, kv_rank]."""
        return self.kv.method.product_by_head(self.kv, q[..., : self.nope_dim], slice(self.nope_dim), transposed=True)

    def _attend_expanded(self, q: Tensor, step: StepInputs, cache: LatentKV) -> Tensor:
        """Attend over expanded keys and values of all prefill rows' contexts."""
        key = ("expanded", self.num_heads)
        plans = step.attention_plans.get(key)
        if plans is None:
            first = step.num_decode
            plan = kernels.plan_expanded_prefill(
                step.block_tables[first:],
                step.q_offsets[first:],
                step.kv_lens[first:],
                cache,
                step.prompts or (),
                num_heads=self.num_heads,
            )
            decode = self._plan_decode(step, cache, first) if first else None
            plans = step.attention_plans[key] = (decode, plan)
        decode, prefill = plans
        assert prefill is not None
        out = q.new_empty((*q.shape[:2], self.value_dim))
        if decode is not None:
            rows = slice(step.num_decode)
            self._attend_absorbed(q[rows], cache, decode, None, out[rows])
        latents, keys = kernels.gather_lines(cache.pages, prefill, rank=self.kv_rank)
        kv = self.kv.method.product(self.kv, latents).view(-1, self.num_heads, self.kv.unit)
        kernels.expanded_prefill_attention(q, kv, keys, prefill, scale=self.scale, out=out)
        return out

    def _expands(self, q: Tensor, step: StepInputs) -> bool:
        """Return whether expanding keys and values of the prompts' contexts saves more than it costs, and they fit. A
        batch-invariant engine computes all rows alike, however prompts are cut."""
        if not step.prompts or step.batch_invariant:
            return False
        pairs = sum(count * context for count, context in step.prompts)
        contexts = sum(context for _, context in step.prompts)
        expansion = self.kv_rank * self.kv.unit
        saved = 2 * self.kv_rank - self.kv.unit
        size = contexts * self.kv.out_features * q.element_size()
        return pairs * saved > contexts * expansion and size <= EXPANDED_BYTES

    def _plans(self, step: StepInputs, cache: LatentKV) -> tuple[DecodePlan | None, PrefillPlan | None]:
        """Return the step's plans, made by the first layer that needs them; None if there are no such rows."""
        spec = self.lines_spec
        plans = step.attention_plans.get(spec)
        if plans is None:
            # The order of sums in decode attention depends on the batch.
            decode = 0 if step.batch_invariant else step.num_decode
            plans = step.attention_plans[spec] = (
                self._plan_decode(step, cache, decode) if decode else None,
                self._plan_prefill(step, cache, decode) if decode < step.kv_lens.shape[0] else None,
            )
        return plans

    def _plan_decode(self, step: StepInputs, cache: LatentKV, count: int) -> DecodePlan:
        """Return the plan for the first `count` rows."""
        return kernels.plan_latent_decode(
            step.block_tables[:count], step.kv_lens[:count], cache, num_heads=self.num_heads
        )

    def _plan_prefill(self, step: StepInputs, cache: LatentKV, first: int) -> PrefillPlan:
        """Return the plan for the rows from `first` on."""
        return kernels.plan_latent_prefill(
            step.block_tables[first:],
            step.q_offsets[first:],
            step.kv_lens[first:],
            cache,
            num_heads=self.num_heads,
            max_q_len=step.max_q_len,
            invariant=step.batch_invariant,
        )


class GatedLatentAttention(LatentAttention):
    """Like `LatentAttention`; each head's output is multiplied by the sigmoid of a product of x (Ling 3.0)."""

    def __init__(self, layer: int, hidden_size: int, **sizes: Any) -> None:
        super().__init__(layer, hidden_size, **sizes)
        self.gate = Linear(hidden_size, self.num_heads, shard="column")

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        step = step.of_layer(self.layer)
        cache: LatentKV = step.caches[self.layer]
        q = self._project(x, self._compressed(x, step), step, cache)
        q, step = self._of_sampled(q, step, sampled)
        rows = x if sampled is None else kernels.gather_rows(x, sampled.indices)
        gates = kernels.sigmoid(self.gate(rows, step).float()).to(x.dtype)
        out: Tensor = self.out((self._attend(q, step, cache) * gates[..., None]).flatten(1), step)
        return out
