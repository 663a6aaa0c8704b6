"""Attention whose result is multiplied by gates: feature by feature (Qwen3-Next), or head by head (LFM3, Laguna)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import KVCache, Rotation, RoundedRows, Rounding
from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.linear import Linear, MergedLinear, QKVLinear
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["GatedAttention", "HeadGatedAttention"]


class _GatedQKVLinear(QKVLinear):
    """The projections q, k and v, and a gate as wide as q."""

    def __init__(self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool) -> None:
        parts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads, "gate": num_heads}
        sizes = {part: heads * head_dim for part, heads in parts.items()}
        MergedLinear.__init__(self, in_features, sizes, unit=head_dim, bias=bias)
        self.num_heads, self.num_kv_heads, self.stored_kv_heads = num_heads, num_kv_heads, num_kv_heads
        self.stored_heads = num_heads
        self.head_dim, self.paired = head_dim, 0

    def _slice_of_part(self, part: str | None, size: int, group: RankGroup) -> slice:
        return super()._slice_of_part("q" if part == "gate" else part, size, group)

    def rope_fill_kv(self, x: Tensor | RoundedRows, rotation: Rotation, cache: KVCache, plan: Tensor) -> Tensor | None:
        return None


class GatedAttention(Attention):
    """Like `Attention`, with head norms and a rotation; the sigmoid of the gate multiplies each head's output."""

    def __init__(self, layer: int, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__(layer, hidden_size, config)
        self.qkv = _GatedQKVLinear(
            hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, bias=config.qkv_bias
        )

    def forward(self, x: Tensor | RoundedRows, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        step = step.of_layer(self.layer)
        cache: KVCache = step.caches[self.layer]
        width = self.num_heads * self.head_dim
        projected = self.qkv(x, step)
        gate = projected[:, -width:]
        rotation = None if self.rope is None else step.rotations[self.rope]
        q = self._rotate(projected[:, :-width].contiguous(), rotation, cache, self._cache_write(step, cache))
        if sampled is not None:
            q = kernels.gather_rows(q.flatten(1), sampled.indices).view(-1, *q.shape[1:])
            gate = kernels.gather_rows(gate.contiguous(), sampled.indices)
            step = sampled.inputs.of_layer(self.layer)
        attended = self._attend(q, step, cache).flatten(1)
        out: Tensor = self.out(attended * kernels.sigmoid(gate), step)
        return out


class HeadGatedAttention(Attention):
    """Like `Attention`; each head's output is multiplied by `activation` of a product of x, with one number per head or
    one per feature."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        config: AttentionConfig,
        *,
        activation: Callable[[Tensor], Tensor],
        by_feature: bool = False,
    ) -> None:
        super().__init__(layer, hidden_size, config)
        width = config.head_dim if by_feature else 1
        self.gate = Linear(hidden_size, config.num_heads * width, shard="column", unit=width)
        self.activation = activation
        # Layers may have other numbers of heads, which a step's plans depend on.
        self.kind = config.window, config.num_heads

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        assert isinstance(x, Tensor), "the layer asks for no rounding"
        step = step.of_layer(self.layer)
        cache: KVCache = step.caches[self.layer]
        q = self._project(x, step, cache)
        if sampled is not None:
            q = kernels.gather_rows(q.flatten(1), sampled.indices).view(-1, *q.shape[1:])
            x = kernels.gather_rows(x, sampled.indices)
            step = sampled.inputs.of_layer(self.layer)
        attended = self._attend(q, step, cache)
        gates = self.activation(self.gate(x, step).float()).to(x.dtype)
        out: Tensor = self.out((attended * gates.view(*attended.shape[:2], -1)).flatten(1), step)
        return out
