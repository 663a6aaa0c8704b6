"""The effect of a step's swaps, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asyncllm.protocol import SwapPlan

__all__ = ["swap_blocks"]


def swap_blocks(plan: SwapPlan, pool: Sequence[Tensor], host: Sequence[Tensor]) -> None:
    """Copy blocks between `pool`, parts [planes, blocks, ...], and `host`, parts [blocks, planes, ...]."""
    for part, host_part in zip(pool, host, strict=True):
        for block, host_block in plan.swap_out:
            host_part[host_block] = part[:, block]
        for host_block, block in plan.swap_in:
            part[:, block] = host_part[host_block]
