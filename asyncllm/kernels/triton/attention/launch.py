"""Code shared by the launchers of decode and prefill attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.cache import KVCache
from asyncllm.kernels.quantized_kv import QuantizedKV
from asyncllm.kernels.triton.attention.plan import AttentionShape, DecodeWork, PrefillTiles, padded_head_dim
from asyncllm.kernels.triton.attention.tile import LOG2_E
from asyncllm.kernels.triton.launch import Configured

__all__ = ["Variant", "launch_attention", "variant_of"]


class Variant(NamedTuple):
    """The compile-time parameters of a kernel other than its config."""

    shape: AttentionShape
    q_stride: int
    out_stride: int
    has_window: bool
    softcap: bool
    sinks: bool
    alibi: bool

    def constexprs(self) -> dict[str, Any]:
        """Return the constants that both kernels share."""
        return {
            "Q_STRIDE": self.q_stride,
            "OUT_STRIDE": self.out_stride,
            "NUM_KV_HEADS": self.shape.num_kv_heads,
            "GROUP": self.shape.group,
            "D": self.shape.head_dim,
            # Products with pairs of codes have half of a line for their sum, 16 numbers at least.
            "PADDED": max(padded_head_dim(self.shape.head_dim), 32 if self.shape.format else 16),
            "PAGE": self.shape.block_size,
            "FORMAT": self.shape.format,
            "HAS_WINDOW": self.has_window,
            "SOFTCAP": self.softcap,
            "SINKS": self.sinks,
            "ALIBI": self.alibi,
        }


def variant_of(
    q: Tensor,
    out: Tensor,
    plan: DecodeWork | PrefillTiles,
    softcap: float | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
) -> Variant:
    """Validate the inputs and return their variant. Raises ValueError unless the plan is for q's heads, and sinks and
    slopes are float32 [H] or absent."""
    num_heads = q.shape[1]
    if num_heads != plan.shape.num_heads:
        raise ValueError(
            f"The plan is for {plan.shape.num_heads} query heads, and q has {num_heads}. Plan for these heads."
        )
    for name, values in (("Sinks", sinks), ("ALiBi slopes", alibi)):
        if values is not None and (values.dtype != torch.float32 or values.shape != (num_heads,)):
            raise ValueError(
                f"{name} are float32 [{num_heads}], one per query head, not {values.dtype} {list(values.shape)}."
            )
    return Variant(
        plan.shape,
        q.stride(0),
        out.stride(0),
        plan.window > 0,
        softcap is not None,
        sinks is not None,
        alibi is not None,
    )


def launch_attention(
    configured: Configured,
    grid: tuple[int, int, int],
    own: tuple[Tensor, ...],
    q: Tensor,
    cache: KVCache,
    plan: DecodeWork | PrefillTiles,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    out: Tensor,
) -> None:
    """Launch a kernel. `own`: the pointers that only this kernel takes."""
    k_ranges, v_ranges = (cache.k_ranges, cache.v_ranges) if isinstance(cache, QuantizedKV) else (cache.k, cache.v)
    pointers = (
        q,
        cache.k,
        cache.v,
        k_ranges,
        v_ranges,
        plan.block_tables,
        out,
        q if sinks is None else sinks,
        q if alibi is None else alibi,
        *own,
    )
    configured(grid, pointers, (*_score_scales(scale, softcap), plan.window, plan.table_stride))


def _score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """(squeeze, steepness): raw = tanh(q k^T * squeeze) with a softcap, else q k^T; weight = 2^(raw * steepness)."""
    if softcap is None:
        return 0.0, scale * LOG2_E.value
    return scale / softcap, softcap * LOG2_E.value
