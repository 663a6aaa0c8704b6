"""Self-attention with grouped query heads over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import DecodePlan, KVCache, PrefillPlan, Rotation, RoundedRows, Rounding
from asyncllm.layers.cache_spec import CacheSpec, PagedKVSpec
from asyncllm.layers.heads_norm import HeadsLayerNorm, HeadsRMSNorm, ListedHeadsLayerNorm
from asyncllm.layers.layer import Layer, PartKey
from asyncllm.layers.linear import Linear, QKVLinear
from asyncllm.layers.linear_method import Shard
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.step_inputs import SampledRows, StepInputs
from asyncllm.layers.unit_norm import UnitNorm

__all__ = ["Attention", "AttentionConfig", "QKNormKind", "Sinks"]

QKNormKind = Literal["head", "heads", "listed", "unit", "whole", "rotated"]
"""Norms of queries and keys. head: each head, with a shared weight. heads: each head with its own weight (layer norms),
stored in one tensor. listed: the same, one tensor per head. unit: each head, without a weight. whole: all heads
together. rotated: each head, after its rotation."""


class Sinks(Layer):
    """One logit per query head that joins the softmax without a value. Always float32."""

    parameter_dtype = torch.float32
    shard: Shard = "column"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self._num_heads, self._first = num_heads, 0

    def divide(self, group: RankGroup) -> None:
        share = self._num_heads // group.size
        self.logits, self._first = nn.Parameter(self.logits[:share], requires_grad=False), group.rank * share

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {("sinks", None, None): (self._num_heads,)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.logits.copy_(tensor[self._first :][: len(self.logits)])


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The differences between attention layers. A family sets only what deviates from the defaults."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    paired: int = 0
    """See `QKVLinear`."""
    rope: int | None = 0
    """Index of the layer's rotation among the step's; None: no rotation."""
    window: int | None = None
    """Number of latest positions that a query sees, itself included; None: all."""
    scale: float | None = None
    """Factor of the scores; None: head_dim^-0.5."""
    softcap: float | None = None
    """Bound on the absolute value of scores."""
    sinks: bool = False
    """Whether the layer has `Sinks`."""
    qkv_clip: float | None = None
    """Bound on the absolute values of q, k and v."""
    scale_queries: bool = False
    """Whether queries are multiplied by the step's `query_scale`."""
    qk_norm: QKNormKind | None = None
    norm_class: Callable[[int, float], nn.Module] = RMSNorm
    """Norm of q and k for the kinds "head", "whole" and "rotated"."""
    norm_eps: float = 1e-6
    alibi: Sequence[float] = ()
    """ALiBi slopes of the heads."""


class Attention(Layer):
    """x [T, hidden] -> [T, hidden]. First writes the tokens' keys and values to the cache of layer `layer`."""

    sees_ahead = True
    """Whether the layer honours joint tokens, the tokens of a step that attend to each other."""

    def __init__(self, layer: int, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer = layer
        self.qkv = QKVLinear(hidden_size, num_heads, num_kv_heads, head_dim, bias=config.qkv_bias, paired=config.paired)
        self.out = Linear(num_heads * head_dim, hidden_size, shard="row", unit=head_dim, bias=config.out_bias)
        self.q_norm, self.k_norm = _norms(config)
        self.sinks = Sinks(num_heads) if config.sinks else None
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope = config.rope
        self.window = config.window
        self.scale = head_dim**-0.5 if config.scale is None else config.scale
        self.softcap = config.softcap
        self.qkv_clip = config.qkv_clip
        self.scale_queries = config.scale_queries
        self.qk_norm = config.qk_norm
        self.ranks: RankGroup | None = None
        """The ranks with the other heads, for a norm of all heads together."""
        self.slopes = tuple(config.alibi)
        self.alibi: Tensor | None = None
        self.kind: Hashable = config.window
        """Layers of equal kind share a step's plans."""

    def place(self, device: torch.device) -> None:
        if self.slopes:
            self.alibi = torch.tensor(self.slopes, dtype=torch.float32, device=device)

    def divide(self, group: RankGroup) -> None:
        if self.qk_norm == "whole":
            self.ranks = group
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.slopes = self.slopes[group.rank * self.num_heads :][: self.num_heads]

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache of the layer's keys and values."""
        return PagedKVSpec(self.num_kv_heads, self.head_dim, self.window)

    def rounding(self, step: StepInputs) -> Rounding | None:
        return self.qkv.rounding(step) if self.qkv.method.rounds else None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: attend for these rows only -> [R, hidden]; keys and values of all tokens are still written."""
        if step.layer_groups:
            step = step.of_layer(self.layer)
        cache = step.caches[self.layer]
        q = self._project(x, step, cache)
        if sampled is not None:
            q = kernels.gather_rows(q.flatten(1), sampled.indices).view(-1, *q.shape[1:])
            step = sampled.inputs.of_layer(self.layer)
        attended = self._attend(q, step, cache)
        out: Tensor = self.out(attended.flatten(1), step)
        return out

    def _project(self, x: Tensor | RoundedRows, step: StepInputs, cache: KVCache) -> Tensor:
        """Write the tokens' keys and values, and return their queries [T, H, D]."""
        rotation = None if self.rope is None else step.rotations[self.rope]
        plan = self._cache_write(step, cache)
        q = None
        if rotation is not None and self.qk_norm is None and self.qkv_clip is None and not self.qkv.adds(step):
            q = self.qkv.rope_fill_kv(x, rotation, cache, plan)
        if q is None:
            qkv = self.qkv(x, step)
            if self.qkv_clip is not None:
                qkv = qkv.clamp_(-self.qkv_clip, self.qkv_clip)
            q = self._rotate(qkv, rotation, cache, plan)
        if self.scale_queries:
            assert step.query_scale is not None, "the model writes it before its first layer"
            q = (q * step.query_scale).to(q.dtype)
        return q

    def _rotate(self, qkv: Tensor, rotation: Rotation | None, cache: KVCache, plan: Tensor) -> Tensor:
        """Normalise and rotate the packed heads, write keys and values, and return the queries [T, H, D]."""
        if rotation is None or self.qk_norm == "rotated":
            return self._fill(self._normed(qkv, rotation), cache, plan)
        q_norm, k_norm = self.q_norm, self.k_norm
        q_weight, k_weight, eps = None, None, 0.0
        if self.qk_norm == "head" and isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            q_weight, k_weight, eps = q_norm.weight, k_norm.weight, q_norm.eps
        else:
            qkv = self._normed(qkv, None)
        return kernels.rope_fill_kv(
            qkv,
            rotation,
            cache,
            plan,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_norm=q_weight,
            k_norm=k_weight,
            eps=eps,
        )

    def _normed(self, qkv: Tensor, rotation: Rotation | None) -> Tensor:
        """Return qkv with queries and keys normalised, after the rotation if that comes first."""
        if self.q_norm is None or self.k_norm is None:
            return qkv
        q, k, v = self._parts(qkv)
        if rotation is not None:
            q, k = kernels.apply_rotary(q, rotation), kernels.apply_rotary(k, rotation)
        if self.qk_norm == "whole":
            q, k = q.flatten(1), k.flatten(1)
        if self.ranks is not None and isinstance(self.q_norm, HeadsRMSNorm) and isinstance(self.k_norm, HeadsRMSNorm):
            # Ranks have equal numbers of heads, also if keys are copied, so the mean over all heads is the mean of the
            # ranks' means.
            means = self.ranks.all_reduce(kernels.mean_squares(qkv, (q.shape[1], k.shape[1]))) / self.ranks.size
            q, k = self.q_norm.scaled(q, means[:, :1]), self.k_norm.scaled(k, means[:, 1:])
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1)

    def _fill(self, qkv: Tensor, cache: KVCache, plan: Tensor) -> Tensor:
        """Write keys and values without rotation, and return the queries [T, H, D]."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        kernels.fill_kv_cache(heads[:, self.num_heads :], cache, plan)
        return heads[:, : self.num_heads]

    def _parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Return the heads of q, k and v, [T, heads, D] each."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)

    def _attend(self, q: Tensor, step: StepInputs, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, D], new and contiguous."""
        decode, prefill = self._plans(step, cache)
        sinks = None if self.sinks is None else self.sinks.logits
        attended = None
        if decode is not None:
            attended = kernels.paged_decode_attention(
                q, cache, decode, scale=self.scale, softcap=self.softcap, sinks=sinks, alibi=self.alibi
            )
        if prefill is not None:
            attended = kernels.paged_prefill_attention(
                q, cache, prefill, scale=self.scale, softcap=self.softcap, sinks=sinks, alibi=self.alibi, out=attended
            )
        assert attended is not None
        for row, start, stop, kv_len in step.joint if self.sees_ahead else ():
            attended[start:stop] = kernels.paged_joint_attention(
                q[start:stop],
                cache,
                step.block_tables[row],
                kv_len=kv_len,
                scale=self.scale,
                softcap=self.softcap,
                window=self.window,
                sinks=sinks,
                alibi=self.alibi,
            )
        return attended

    def _cache_write(self, step: StepInputs, cache: KVCache) -> Tensor:
        """Return the cache locations of the step's tokens, computed by the first layer with this number of KV heads."""
        plan = step.cache_writes.get(self.num_kv_heads)
        if plan is None:
            plan = step.cache_writes[self.num_kv_heads] = kernels.plan_cache_write(step.places, cache)
        return plan

    def _plans(self, step: StepInputs, cache: KVCache) -> tuple[DecodePlan | None, PrefillPlan | None]:
        """Return the step's plans for this kind of layer, made by the first layer that needs them; None if there are no
        such rows."""
        plans = step.attention_plans.get(self.kind)
        if plans is None:
            # The order of sums in decode attention depends on the batch.
            decode = 0 if step.batch_invariant else step.num_decode
            plans = step.attention_plans[self.kind] = (
                self._plan_decode(step, cache, decode) if decode else None,
                self._plan_prefill(step, cache, decode) if decode < step.kv_lens.shape[0] else None,
            )
        return plans

    def _plan_decode(self, step: StepInputs, cache: KVCache, count: int) -> DecodePlan:
        """Return the plan for the first `count` rows."""
        return kernels.plan_decode_attention(
            step.block_tables[:count],
            step.kv_lens[:count],
            cache,
            num_heads=self.num_heads,
            window=self.window,
        )

    def _plan_prefill(self, step: StepInputs, cache: KVCache, first: int) -> PrefillPlan:
        """Return the plan for the rows from `first` on."""
        return kernels.plan_prefill_attention(
            step.block_tables[first:],
            step.q_offsets[first:],
            step.kv_lens[first:],
            cache,
            num_heads=self.num_heads,
            max_q_len=step.max_q_len,
            window=self.window,
            invariant=step.batch_invariant,
        )


def _norms(config: AttentionConfig) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the norms of queries and of keys, or None for each."""
    kind, dim, eps = config.qk_norm, config.head_dim, config.norm_eps
    heads = config.num_heads, config.num_kv_heads
    if kind is None:
        return None, None
    if kind in ("heads", "listed"):
        make = HeadsLayerNorm if kind == "heads" else ListedHeadsLayerNorm
        return make(heads[0], dim, eps, paired=config.paired), make(heads[1], dim, eps, paired=config.paired)
    if kind == "unit":
        return UnitNorm(dim, eps), UnitNorm(dim, eps)
    if kind == "whole":
        return HeadsRMSNorm(heads[0], dim, eps), HeadsRMSNorm(heads[1], dim, eps)
    return config.norm_class(dim, eps), config.norm_class(dim, eps)
