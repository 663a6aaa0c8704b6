"""Contexts in blocks, and softmax attention over them written out in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncllm.kernels import PagedKV

HEAD_DIM = 8
SCALE = 0.4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pages:
    """Random contexts of several rows in randomly ordered blocks; what no row owns is `garbage`. A length of -1 is that
    of an absent row."""

    def __init__(
        self,
        lengths: list[int],
        block_size: int,
        num_kv_heads: int,
        dtype: torch.dtype = torch.float32,
        *,
        head_dim: int = HEAD_DIM,
        garbage: float = 1e3,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        width = max(-(-max(length, 0) // block_size) for length in lengths) + 1
        num_blocks = len(lengths) * width + 3
        pool = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), garbage, dtype=dtype)
        order = torch.randperm(num_blocks, generator=generator(seed))[: len(lengths) * width]
        tables = order.view(len(lengths), width)
        self.lengths = lengths
        self.contexts = []
        for row, length in enumerate(lengths):
            numbers = torch.randn(2, max(length, 0), num_kv_heads, head_dim, generator=generator(seed + row + 1))
            k, v = numbers.to(dtype)
            positions = torch.arange(max(length, 0))
            blocks = tables[row, positions // block_size]
            pool[0, blocks, :, positions % block_size] = k
            pool[1, blocks, :, positions % block_size] = v
            self.contexts.append((k.to(device), v.to(device)))
        self.cache = PagedKV.over(pool.to(device))
        self.block_tables = tables.int().to(device)
        self.kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Variant:
    """Which keys a query sees, and what becomes of its scores."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def extras(self, num_heads: int, device: str = "cpu") -> dict[str, Any]:
        """Arguments of the ops beside the plan."""
        extras: dict[str, Any] = {"scale": SCALE, "softcap": self.softcap}
        if self.sinks:
            extras["sinks"] = torch.randn(num_heads, generator=generator(41)).to(device)
        if self.alibi:
            extras["alibi"] = torch.rand(num_heads, generator=generator(42)).to(device) * 0.2
        return extras


def oracle(q: Tensor, k: Tensor, v: Tensor, first: int, variant: Variant, *, joint: bool = False) -> Tensor:
    """q [T, H, D] at positions first, first + 1, ... against k and v [S, K, D], in float64. `joint`: they see each
    other."""
    tokens, num_heads, _ = q.shape
    extras = variant.extras(num_heads, str(q.device))
    k, v = (part.double().repeat_interleave(num_heads // k.shape[1], 1) for part in (k, v))
    scores = torch.einsum("thd,shd->ths", q.double(), k) * SCALE
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    distance = torch.arange(len(k), device=q.device) - torch.arange(first, first + tokens, device=q.device)[:, None]
    if variant.alibi:
        scores = scores + extras["alibi"].double()[:, None] * distance[:, None]
    hidden = (distance > 0) & (not joint)
    hidden = hidden if variant.window is None else hidden | (distance <= -variant.window)
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if variant.sinks:
        sinks = extras["sinks"].double()[None, :, None].expand(tokens, num_heads, 1)
        return torch.einsum("ths,shd->thd", torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], v)
    return torch.einsum("ths,shd->thd", scores.softmax(-1), v)


def expected_decode(q: Tensor, pages: Pages, variant: Variant) -> Tensor:
    rows = [
        oracle(q[row : row + 1], k, v, len(k) - 1, variant) if len(k) else torch.zeros_like(q[:1], dtype=torch.float64)
        for row, (k, v) in enumerate(pages.contexts)
    ]
    return torch.cat(rows)


def expected_prefill(q: Tensor, pages: Pages, counts: list[int], variant: Variant) -> Tensor:
    chunks = zip(q.split(counts), pages.contexts, strict=True)
    return torch.cat([oracle(chunk, k, v, len(k) - len(chunk), variant) for chunk, (k, v) in chunks])


def offsets_of(counts: list[int], device: str = "cpu", base: int = 0) -> Tensor:
    """Where rows of so many queries begin and end behind `base` tokens of others."""
    ends = [base + sum(counts[: n + 1]) for n in range(len(counts))]
    return torch.tensor([base, *ends], dtype=torch.int32).to(device)
