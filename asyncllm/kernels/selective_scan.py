"""Mamba's selective scan: every feature has its own state and forgets at its own rate (arXiv 2312.00752)."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op
from asyncllm.kernels.recurrent import StatePlan

__all__ = ["selective_scan"]


@op("selective_scan:selective_scan")
def selective_scan(
    x: Tensor, sizes: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    """At a step of some size, a feature's state decays by exp(rate * size), the write vector times size * x is added,
    and then the read vector reads it.

    x [T, C], sizes [T, C] float32, rates [C, N] float32, below 0; writes, reads [T, N] -> [T, C]. `state` [blocks, N,
    C] float32.
    """
    out = x.new_empty(x.shape)
    begin, end = plan.q_offsets[:-1].long(), plan.q_offsets[1:].long()
    held = torch.where((plan.sources >= 0)[:, None, None], state[plan.sources.clamp(min=0)], 0)
    rates, wide = rates.t(), x.float()
    for step in range(int((end - begin).max())):
        rows = torch.nonzero(end - begin > step)[:, 0]
        token = begin[rows] + step
        size = sizes[token][:, None]
        memory = held[rows] * (size * rates).exp() + writes[token].float()[..., None] * (size * wide[token][:, None])
        out[token] = (memory * reads[token].float()[..., None]).sum(1).to(x.dtype)
        held[rows] = memory
        written = plan.targets[token] >= 0
        state[plan.targets[token][written]] = memory[written]
    return out
