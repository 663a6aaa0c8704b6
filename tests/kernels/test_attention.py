"""Paged attention against dense softmax attention written out per query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV
from asyncllm.kernels import attention as attention_module

HEAD_DIM = 8


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pages:
    """Random contexts of several rows in randomly ordered pages; what no row owns is garbage."""

    def __init__(
        self, lengths: list[int], block_size: int, num_kv_heads: int, dtype: torch.dtype = torch.float32
    ) -> None:
        width = max(-(-length // block_size) for length in lengths) + 1
        num_blocks = len(lengths) * width + 3
        shape = (num_blocks, num_kv_heads, block_size, HEAD_DIM)
        self.cache = PagedKV.over(
            torch.stack([torch.full(shape, 1e3, dtype=dtype), torch.full(shape, -1e3, dtype=dtype)])
        )
        order = torch.randperm(num_blocks, generator=generator(0))[: len(lengths) * width]
        self.block_tables = order.view(len(lengths), width).int()
        self.lengths = lengths
        self.contexts = []
        for row, length in enumerate(lengths):
            k, v = torch.randn(2, length, num_kv_heads, HEAD_DIM, generator=generator(row + 1)).to(dtype)
            positions = torch.arange(length)
            slots = self.block_tables[row].long()[positions // block_size] * block_size + positions % block_size
            kernels.fill_kv_cache(torch.cat([k, v], 1), self.cache, kernels.plan_cache_write(slots, self.cache))
            self.contexts.append((k, v))

    @property
    def kv_lens(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)


def dense(
    q: Tensor, k: Tensor, v: Tensor, position: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One query q [H, D] at `position` against k and v [S, K, D], in float64."""
    group = q.shape[0] // k.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    k, v = (part[first : position + 1].double().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("hd,shd->hs", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v)


@pytest.fixture(params=[1024, 0], ids=["gathered", "bags"], autouse=True)
def _value_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention sums V in one of two ways, by the size of the batch."""
    monkeypatch.setattr(attention_module, "GATHER_LINES", request.param)


VARIANTS = pytest.mark.parametrize(
    ("window", "softcap"),
    [(None, None), (7, None), (1, None), (None, 2.0), (7, 2.0), (1000, None)],
    ids=["full", "window", "self", "softcap", "window-softcap", "wide-window"],
)


def decode(q: Tensor, pages: Pages, window: int | None, softcap: float | None) -> Tensor:
    plan = kernels.plan_decode_attention(pages.block_tables, pages.kv_lens, pages.cache, window=window)
    return kernels.paged_decode_attention(q, pages.cache, plan, scale=0.4, softcap=softcap)


@VARIANTS
@pytest.mark.parametrize("lengths", [[1], [23], [5, 23, 1, 16, 17], [12, 12]], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("block_size", [16, 5])
def test_decode(
    lengths: list[int], num_heads: int, num_kv_heads: int, block_size: int, window: int | None, softcap: float | None
) -> None:
    pages = Pages(lengths, block_size, num_kv_heads)
    q = torch.randn(len(lengths), num_heads, HEAD_DIM, generator=generator(99))
    expected = [
        dense(q[row], k, v, lengths[row] - 1, 0.4, window, softcap) for row, (k, v) in enumerate(pages.contexts)
    ]
    torch.testing.assert_close(decode(q, pages, window, softcap).double(), torch.stack(expected), atol=2e-6, rtol=1e-5)


def test_decode_in_tiles_is_decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages([5, 23, 1, 16, 17], 5, 2)
    q = torch.randn(5, 4, HEAD_DIM, generator=generator(1))
    whole = decode(q, pages, None, None)
    # Tiles of three lists of lines: the ten lists of five rows end with a shorter tile.
    monkeypatch.setattr(attention_module, "DECODE_TILE", 3 * 23 * HEAD_DIM)
    torch.testing.assert_close(decode(q, pages, None, None), whole)


@pytest.mark.parametrize("gather_lines", [0, 30, 10**6])
def test_decode_whether_values_are_gathered_or_not(monkeypatch: pytest.MonkeyPatch, gather_lines: int) -> None:
    pages = Pages([5, 23, 1, 16, 17], 5, 2)
    q = torch.randn(5, 4, HEAD_DIM, generator=generator(1))
    whole = decode(q, pages, None, None)
    monkeypatch.setattr(attention_module, "DECODE_TILE", 3 * 23 * HEAD_DIM)
    monkeypatch.setattr(attention_module, "GATHER_LINES", gather_lines)
    torch.testing.assert_close(decode(q, pages, None, None), whole)


@VARIANTS
@pytest.mark.parametrize(
    ("lengths", "counts"), [([9], [9]), ([23, 5, 17], [4, 5, 1]), ([40], [13])], ids=["whole", "chunks", "late"]
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("query_tile", [512, 3])
def test_prefill(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    counts: list[int],
    num_heads: int,
    num_kv_heads: int,
    query_tile: int,
    window: int | None,
    softcap: float | None,
) -> None:
    monkeypatch.setattr(attention_module, "QUERY_TILE", query_tile)
    pages = Pages(lengths, 5, num_kv_heads)
    q = torch.randn(sum(counts), num_heads, HEAD_DIM, generator=generator(7))
    offsets = [0]
    expected = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            position = length - count + index
            expected.append(dense(q[offsets[-1] + index], *pages.contexts[row], position, 0.4, window, softcap))
        offsets.append(offsets[-1] + count)
    actual = kernels.paged_prefill_attention(
        q,
        pages.cache,
        pages.block_tables,
        torch.tensor(offsets, dtype=torch.int32),
        pages.kv_lens,
        scale=0.4,
        window=window,
        softcap=softcap,
    )
    torch.testing.assert_close(actual.double(), torch.stack(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision(dtype: torch.dtype, softcap: float | None) -> None:
    pages = Pages([23, 9], 16, 2, dtype)
    q = torch.randn(2, 4, HEAD_DIM, generator=generator(3)).to(dtype)
    rows = enumerate(zip(pages.contexts, pages.lengths, strict=True))
    expected = torch.stack([dense(q[row], *context, length - 1, 0.4, None, softcap) for row, (context, length) in rows])
    actual = decode(q, pages, None, softcap)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=3e-2, rtol=3e-2)
    prefilled = kernels.paged_prefill_attention(
        q, pages.cache, pages.block_tables, torch.tensor([0, 1, 2]), pages.kv_lens, scale=0.4, softcap=softcap
    )
    torch.testing.assert_close(prefilled.double(), expected, atol=3e-2, rtol=3e-2)
