"""Self-attention with grouped query heads over the paged cache."""

from __future__ import annotations

from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import DecodePlan, PagedKV, PrefillPlan, Rotation
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear, QKVLinear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["Attention"]


class Attention(Layer):
    """x [T, hidden] -> [T, hidden]; the tokens' keys and values go to `cache` first.

    `window` is the number of latest positions that a query sees, itself included; `scale` multiplies the scores,
    head_dim^-0.5 unless given; `qk_norm_eps` asks for a per-head RMS norm of q and k.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.qkv = QKVLinear(hidden_size, num_heads, num_kv_heads, head_dim, bias=qkv_bias)
        self.out = Linear(num_heads * head_dim, hidden_size, bias=out_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        inputs: StepInputs,
        cache: PagedKV,
        sampled: SampledRows | None = None,
    ) -> Tensor:
        """`sampled`: attend for these rows only -> [R, hidden]; keys and values of all tokens are written."""
        q = self._project(x, rotation, cache, self._cache_write(inputs, cache))
        if sampled is not None:
            q, inputs = kernels.gather_rows(q.flatten(1), sampled.indices).view(-1, *q.shape[1:]), sampled.inputs
        attended = self._attend(q, inputs, cache)
        out: Tensor = self.out(attended.flatten(1))
        return out

    def _project(self, x: Tensor, rotation: Rotation, cache: PagedKV, plan: Tensor) -> Tensor:
        """Write the tokens' keys and values, return their queries [T, H, D]."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.qkv.product is kernels.linear and self.qkv.bias is None and q_norm is None:
            return kernels.linear_rope_fill_kv(
                x,
                self.qkv.weight,
                rotation,
                cache,
                plan,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
            )
        return kernels.rope_fill_kv(
            self.qkv(x),
            rotation,
            cache,
            plan,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
        )

    def _attend(self, q: Tensor, inputs: StepInputs, cache: PagedKV) -> Tensor:
        """q [T, H, D] -> [T, H, D], new and contiguous."""
        decode, prefill = self._plans(inputs, cache)
        attended = None
        if decode is not None:
            attended = kernels.paged_decode_attention(q, cache, decode, scale=self.scale, softcap=self.softcap)
        if prefill is not None:
            attended = kernels.paged_prefill_attention(
                q, cache, prefill, scale=self.scale, softcap=self.softcap, out=attended
            )
        assert attended is not None
        return attended

    def _cache_write(self, inputs: StepInputs, cache: PagedKV) -> Tensor:
        """Where the step's tokens go, found by the first layer with as many KV heads."""
        plan = inputs.cache_writes.get(self.num_kv_heads)
        if plan is None:
            plan = inputs.cache_writes[self.num_kv_heads] = kernels.plan_cache_write(inputs.slot_mapping, cache)
        return plan

    def _plans(self, inputs: StepInputs, cache: PagedKV) -> tuple[DecodePlan | None, PrefillPlan | None]:
        """The step's plans for this window, made by the first layer that needs them; None where there are no rows."""
        plans = inputs.attention_plans.get(self.window)
        if plans is None:
            # The order of sums in decode attention depends on the batch.
            decode = 0 if inputs.batch_invariant else inputs.num_decode
            plans = inputs.attention_plans[self.window] = (
                self._plan_decode(inputs, cache, decode) if decode else None,
                self._plan_prefill(inputs, cache, decode) if decode < inputs.kv_lens.shape[0] else None,
            )
        return plans

    def _plan_decode(self, inputs: StepInputs, cache: PagedKV, count: int) -> DecodePlan:
        """The first `count` rows."""
        return kernels.plan_decode_attention(
            inputs.block_tables[:count],
            inputs.kv_lens[:count],
            cache,
            num_heads=self.num_heads,
            window=self.window,
        )

    def _plan_prefill(self, inputs: StepInputs, cache: PagedKV, first: int) -> PrefillPlan:
        """The rows from `first` on."""
        return kernels.plan_prefill_attention(
            inputs.block_tables[first:],
            inputs.q_offsets[first:],
            inputs.kv_lens[first:],
            cache,
            num_heads=self.num_heads,
            max_q_len=inputs.max_q_len,
            window=self.window,
            invariant=inputs.batch_invariant,
        )
