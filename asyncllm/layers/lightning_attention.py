"""Lightning attention: linear attention whose heads forget at fixed rates (MiniMax-Text-01, arXiv 2501.08313; Ling
2.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.delta_net import WholeParts
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["LightningAttention", "RotatedLightningAttention"]


class LightningAttention(StateLayer):
    """x [T, hidden] -> [T, hidden]: the silu of queries, keys and values goes through `kernels.state_space`, whose
    result is normalised over all heads and multiplied by the sigmoid of a gate.

    The state is the memory [H, D, D], in float32.
    """

    first_products = ("inputs",)

    def __init__(self, layer: int, hidden_size: int, *, head_dim: int, rates: Sequence[float], norm_eps: float) -> None:
        """`rates`: a head's memory keeps exp(-rate) of its content per token."""
        super().__init__()
        self.layer = layer
        self.num_heads, self.head_dim, self.rates = len(rates), head_dim, tuple(rates)
        size = self.num_heads * head_dim
        self.inputs = WholeParts(
            hidden_size, {"q": size, "k": size, "v": size, "gate": size}, stored_heads=self.num_heads
        )
        self.norm = RMSNorm(size, norm_eps)
        self.out = Linear(size, hidden_size, shard="replicated")
        self.cache_spec = StateSpec(((self.num_heads, head_dim, head_dim),), (torch.float32,))
        self.log_decay: Tensor

    def place(self, device: torch.device) -> None:
        self.log_decay = -torch.tensor(self.rates, dtype=torch.float32, device=device)

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        projected = self.inputs(x, step)
        mixed, gate = projected.split([3 * self.out.in_features, self.out.in_features], -1)
        q, k, v = self._heads(mixed.view(len(x), 3, self.num_heads, self.head_dim), step)
        decay = self.log_decay.expand(len(x), -1)
        y = kernels.state_space(q, k, v, decay, torch.ones_like(decay), cache.tensors[0], step.states(cache)).flatten(1)
        if sampled is not None:
            y, gate = (kernels.gather_rows(each.contiguous(), sampled.indices) for each in (y, gate))
            step = sampled.inputs
        out: Tensor = self.out(self.norm(y) * kernels.sigmoid(gate), step)
        return out

    def _heads(self, mixed: Tensor, step: StepInputs) -> tuple[Tensor, ...]:
        """Return queries, keys and values [T, H, D] each, of their projections [T, 3, H, D]."""
        return kernels.silu(mixed).unbind(1)


class GroupsNorm(ParameterOwner):
    """x [T, size] -> [T, size]: RMS norm over each group of neighbouring features, with a weight per feature."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().view(len(x), self.groups, -1)
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.view_as(x).to(x.dtype)


class RotatedLightningAttention(LightningAttention):
    """Like `LightningAttention`, with queries and keys that are rotated by the step's first rotation, and scaled
    queries; the result is normalised by groups of heads."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        head_dim: int,
        rates: Sequence[float],
        norm_eps: float,
        groups: int,
        head_norms: bool,
        silu: bool,
        rotated: bool,
    ) -> None:
        """`groups`: number of groups. `head_norms`: whether queries and keys are normalised by head. `silu`: whether
        queries, keys and values go through silu first. `rotated`: whether there is a rotation."""
        super().__init__(layer, hidden_size, head_dim=head_dim, rates=rates, norm_eps=norm_eps)
        self.q_norm, self.k_norm = (RMSNorm(head_dim, norm_eps) if head_norms else None for _ in range(2))
        self.norm = GroupsNorm(self.out.in_features, groups, norm_eps)  # type: ignore[assignment]
        self.silu, self.rotated = silu, rotated

    def _heads(self, mixed: Tensor, step: StepInputs) -> tuple[Tensor, ...]:
        q, k, v = (each.contiguous() for each in (kernels.silu(mixed) if self.silu else mixed).unbind(1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotated:
            rotation = step.rotations[0]
            q, k = kernels.apply_rotary(q, rotation), kernels.apply_rotary(k, rotation)
        return q * self.head_dim**-0.5, k, v
