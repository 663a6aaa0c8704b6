"""Rows of a matrix by index: token embeddings, and the hidden states that are sampled from."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["embed", "gather_rows", "rounded"]


@cache
def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the value of `dtype` nearest to `value`."""
    return torch.tensor(value, dtype=dtype).item()


@op("embedding:embed")
def embed(ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    """Return rows of table [V, H] at ids [T] int64 -> [T, H], times `scale` if given.

    The scale is rounded to the table's dtype first: Gemma was trained with sqrt(hidden) in bfloat16.
    """
    rows = F.embedding(ids, table)
    return rows if scale is None else rows.mul_(rounded(scale, rows.dtype))


@op("embedding:gather_rows")
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [T, H], indices [R] int32 or int64 -> x's rows at indices [R, H]."""
    return x.index_select(0, indices)
