"""Launcher of `linear_silu_mul`, and the measured table of shapes for which one kernel beats a product and a gate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from asyncllm.kernels.triton.activation import silu_mul
from asyncllm.kernels.triton.device import table_name
from asyncllm.kernels.triton.linear.product import choose, for_few_tokens, linear
from asyncllm.kernels.triton.linear.small import GemvConfig, SkinnyConfig, gemv, skinny

__all__ = ["TABLES", "GatedConfig", "linear_silu_mul"]


@dataclass(frozen=True)
class GatedConfig:
    """The division of work in the kernel of `linear/hopper.py`: tiles of 128 or 192 tokens, whole or in equal
    `shares`."""

    tokens: int = 128
    shares: bool = False


Config = GatedConfig | SkinnyConfig

Table = dict[tuple[int, int], tuple[tuple[int, Config | None], ...]]

TABLES: dict[str, Table] = {
    "NVIDIA H200": {
        (28672, 4096): (
            (64, SkinnyConfig(128, 128, splits=1, stages=4, warps=8)),  # a layer 156.5 us at 64 tokens, without 160.0
            (128, GatedConfig()),  # 68.2 us at 128 tokens, cuBLAS and the gate 75.4; a layer 134.4, 139.3
            (192, None),
            (256, GatedConfig(shares=True)),  # 105.6 us at 256 tokens, 116.7; a layer 197.4, 202.7
            (352, None),  # 119.7 us at 320, in shares 130.7
            (1023, GatedConfig(shares=True)),  # a layer 345.3 us at 512, 348.5; 248.2 us alone at 768, 280.3
            (4095, GatedConfig()),  # 389.6 us at 1,024, 399.9; 751 at 2,048, 775; a layer 698, 714 at 1,024
            (16384, GatedConfig(192)),  # a layer 5,239 us at 8,192, 5,652, and 5,466 in tiles of 128
        ),
        (14336, 4096): (
            (64, SkinnyConfig(128, 128, splits=1, stages=4, warps=8)),
            (192, None),
            (256, GatedConfig(shares=True)),
            (352, None),
            (1023, GatedConfig(shares=True)),
            (4095, GatedConfig()),
            (16384, GatedConfig(192)),
        ),
        # As for the product alone.
        (5632, 2048): ((16, SkinnyConfig(64, 128, stages=5)), (64, SkinnyConfig(64, 128, stages=4))),
        (37888, 3584): (
            (16, SkinnyConfig(64, 128, splits=1, stages=5)),  # 67.5 us, cuBLAS and the gate 72.9
            (383, None),  # 105.8 us at 256 tokens, in shares 106.9
            (767, GatedConfig(shares=True)),  # 193.5 us at 512, 200.6
            (16384, GatedConfig()),  # 368.6 us at 1,024, 378.5; 3,315 at 8,192, 3,362
        ),
        (16384, 3072): (
            (64, SkinnyConfig(128, 128, splits=1, stages=4, warps=8)),  # 27.8 us at 16 tokens, 32.5; 30.1 at 64, 31.7
            (383, None),  # 35.1 us at 128, in shares 45.5
            (2047, GatedConfig(shares=True)),  # 80.8 us at 512, 90.8; 144.1 at 1,024, 153.2
        ),
    }
}
"""Device name -> weight shape (2 * N, K) -> (maximum number of tokens, configuration), ascending. None, and numbers
that no entry covers, use `linear` and `silu_mul`; a single token uses `linear`'s kernel with the gate. Figures are in
bf16, with the weights of 8 layers in turn; a layer is its four products and the gate (Triton 3.6.0, CUDA 13.0).

None means that nothing was measured, or that `linear` has its own kernel or is faster. The fused kernel alone is not
faster in every entry: at 512 tokens it takes 193.6 us instead of 190.7, at 8,192 in tiles of 192 3,058 us instead of
3,053 (2,930 in tiles of 128). There the time of the whole layer decides, up to 64 tokens including its norms, rotation
and attention to 400 keys per row. The second shape is half of the first, for two ranks, and is not timed. The others,
timed after a norm, are Qwen2.5-7B's and Phi-3-mini's."""


def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    table = _table(x.device)
    if table:
        rows = x.reshape(-1, x.shape[-1])
        alone = for_few_tokens(rows, weight) if len(rows) == 1 else None
        if isinstance(alone, GemvConfig):
            return gemv(rows, weight, config=alone, gated=True).view(*x.shape[:-1], weight.shape[0] // 2)
        config = choose(table, rows, weight) if rows.dtype == weight.dtype == torch.bfloat16 else None
        if config is not None:
            if isinstance(config, SkinnyConfig):
                y = skinny(rows, weight, config=config, gated=True)
            else:
                from asyncllm.kernels.triton.linear.hopper import gated_product

                y = gated_product(rows, weight, config.tokens, shares=config.shares)
            return y.view(*x.shape[:-1], weight.shape[0] // 2)
    return silu_mul(linear(x, weight))


@cache
def _table(device: torch.device) -> Table:
    return TABLES.get(table_name(device), {})
