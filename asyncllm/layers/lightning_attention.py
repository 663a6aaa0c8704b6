"""Lightning attention: linear attention whose heads forget at fixed rates (MiniMax-Text-01, arXiv 2501.08313)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.delta_net import WholeParts
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["LightningAttention"]


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
        q, k, v = kernels.silu(mixed).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        decay = self.log_decay.expand(len(x), -1)
        y = kernels.state_space(q, k, v, decay, torch.ones_like(decay), cache.tensors[0], step.states(cache)).flatten(1)
        if sampled is not None:
            y, gate = (kernels.gather_rows(each.contiguous(), sampled.indices) for each in (y, gate))
            step = sampled.inputs
        out: Tensor = self.out(self.norm(y) * kernels.sigmoid(gate), step)
        return out
