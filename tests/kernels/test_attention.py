"""The references of paged attention against softmax attention written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import attention as attention_module
from tests.kernels.attention_cases import (
    HEAD_DIM,
    SCALE,
    Pages,
    Variant,
    expected_decode,
    expected_prefill,
    generator,
    offsets_of,
    oracle,
)


def decode(q: Tensor, pages: Pages, variant: Variant) -> Tensor:
    plan = kernels.plan_decode_attention(
        pages.block_tables, pages.kv_lens, pages.cache, num_heads=q.shape[1], window=variant.window
    )
    return kernels.paged_decode_attention(q, pages.cache, plan, **variant.extras(q.shape[1]))


def prefill(q: Tensor, pages: Pages, counts: list[int], variant: Variant, *, invariant: bool = False) -> Tensor:
    plan = kernels.plan_prefill_attention(
        pages.block_tables,
        offsets_of(counts),
        pages.kv_lens,
        pages.cache,
        num_heads=q.shape[1],
        max_q_len=max(counts),
        window=variant.window,
        invariant=invariant,
    )
    return kernels.paged_prefill_attention(q, pages.cache, plan, **variant.extras(q.shape[1]))


@pytest.fixture(params=[1024, 0], ids=["gathered", "bags"])
def _value_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention sums V in one of two ways, by the size of the batch."""
    monkeypatch.setattr(attention_module, "GATHER_LINES", request.param)


VARIANTS = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(), id="full"),
        pytest.param(Variant(window=7), id="window"),
        pytest.param(Variant(window=1), id="self"),
        pytest.param(Variant(softcap=2.0), id="softcap"),
        pytest.param(Variant(window=7, softcap=2.0), id="window-softcap"),
        pytest.param(Variant(window=1000), id="wide-window"),
        pytest.param(Variant(sinks=True), id="sinks"),
        pytest.param(Variant(alibi=True), id="alibi"),
        pytest.param(Variant(window=7, softcap=2.0, sinks=True, alibi=True), id="all"),
    ],
)


@VARIANTS
@pytest.mark.parametrize("lengths", [[1], [5, 23, 1, 16, 17], [12, 12], [9, 0, 20]], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.usefixtures("_value_path")
def test_decode(lengths: list[int], num_heads: int, num_kv_heads: int, block_size: int, variant: Variant) -> None:
    pages = Pages(lengths, block_size, num_kv_heads)
    q = torch.randn(len(lengths), num_heads, HEAD_DIM, generator=generator(99))
    actual = decode(q, pages, variant)
    torch.testing.assert_close(actual.double(), expected_decode(q, pages, variant), atol=2e-6, rtol=1e-5)


@pytest.mark.usefixtures("_value_path")
def test_decode_of_padding_alone_is_zeros() -> None:
    pages = Pages([0, 0], 16, 2, garbage=float("nan"))
    assert torch.equal(decode(torch.ones(2, 4, HEAD_DIM), pages, Variant()), torch.zeros(2, 4, HEAD_DIM))


@VARIANTS
@pytest.mark.parametrize("lengths", [[5, 23, -1, -1], [9, 0, -1], [-1, -1]], ids=str)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.usefixtures("_value_path")
def test_absent_decode_rows_have_no_token(lengths: list[int], given: bool, variant: Variant) -> None:
    """Not even where there are fewer tokens than rows."""
    there = [length for length in lengths if length >= 0]
    pages, present = Pages(lengths, 16, 2), Pages(there or [1], 16, 2)
    q = torch.randn(len(there) + 1, 4, HEAD_DIM, generator=generator(5))
    out = torch.full(q.shape, float("nan")) if given else None
    plan = kernels.plan_decode_attention(
        pages.block_tables, pages.kv_lens, pages.cache, num_heads=4, window=variant.window
    )
    attended = kernels.paged_decode_attention(q, pages.cache, plan, out=out, **variant.extras(4))
    assert attended.shape == q.shape
    if out is not None:
        assert attended is out
        assert out[len(there) :].isnan().all()
    if there:
        expected = expected_decode(q[: len(there)], present, variant)
        torch.testing.assert_close(attended[: len(there)].double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("gather_lines", [0, 30, 10**6])
@pytest.mark.parametrize("variant", [Variant(), Variant(sinks=True, alibi=True)], ids=["plain", "extras"])
def test_decode_in_tiles_is_decode_at_once(
    monkeypatch: pytest.MonkeyPatch, gather_lines: int, variant: Variant
) -> None:
    pages = Pages([5, 23, 1, 16, 17], 5, 2)
    q = torch.randn(5, 4, HEAD_DIM, generator=generator(1))
    whole = decode(q, pages, variant)
    # Tiles of three lists of lines: the ten lists of five rows end with a shorter tile.
    monkeypatch.setattr(attention_module, "DECODE_TILE", 3 * 23 * HEAD_DIM)
    monkeypatch.setattr(attention_module, "GATHER_LINES", gather_lines)
    torch.testing.assert_close(decode(q, pages, variant), whole)


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
    variant: Variant,
) -> None:
    monkeypatch.setattr(attention_module, "QUERY_TILE", query_tile)
    pages = Pages(lengths, 5, num_kv_heads)
    q = torch.randn(sum(counts), num_heads, HEAD_DIM, generator=generator(7))
    expected = expected_prefill(q, pages, counts, variant)
    torch.testing.assert_close(prefill(q, pages, counts, variant).double(), expected, atol=2e-6, rtol=1e-5)


@VARIANTS
@pytest.mark.parametrize(("length", "count"), [(9, 9), (23, 4), (40, 13)])
def test_tokens_that_see_each_other(length: int, count: int, variant: Variant) -> None:
    pages = Pages([3, length], 5, 2)
    q = torch.randn(count, 4, HEAD_DIM, generator=generator(8))
    extras = variant.extras(4)
    attended = kernels.paged_joint_attention(
        q, pages.cache, pages.block_tables[1], kv_len=length, window=variant.window, **extras
    )
    expected = oracle(q, *pages.contexts[1], length - count, variant, joint=True)
    torch.testing.assert_close(attended.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [Variant(), Variant(softcap=2.0), Variant(sinks=True)], ids=str)
@pytest.mark.usefixtures("_value_path")
def test_half_precision(dtype: torch.dtype, variant: Variant) -> None:
    pages = Pages([23, 9], 16, 2, dtype)
    q = torch.randn(2, 4, HEAD_DIM, generator=generator(3)).to(dtype)
    expected = expected_decode(q, pages, variant)
    for actual in (decode(q, pages, variant), prefill(q, pages, [1, 1], variant)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("given", [True, False])
def test_two_decode_rows_and_a_chunk_share_q_and_out(given: bool) -> None:
    pages = Pages([23, 9, 14], 16, 2)
    counts = [1, 1, 5]
    q = torch.randn(7, 4, HEAD_DIM, generator=generator(3))
    out = torch.full((8, 4, HEAD_DIM), float("nan"))[1:] if given else None
    plan = kernels.plan_decode_attention(pages.block_tables[:2], pages.kv_lens[:2], pages.cache, num_heads=4)
    attended = kernels.paged_decode_attention(q, pages.cache, plan, scale=SCALE, out=out)
    assert attended.shape == q.shape
    if out is not None:
        assert attended.data_ptr() == out.data_ptr()
        assert out[2:].isnan().all()
    plan = kernels.plan_prefill_attention(
        pages.block_tables[2:],
        offsets_of(counts)[2:],
        pages.kv_lens[2:],
        pages.cache,
        num_heads=4,
        max_q_len=5,
    )
    assert kernels.paged_prefill_attention(q, pages.cache, plan, scale=SCALE, out=attended) is attended
    expected = expected_prefill(q, pages, counts, Variant())
    torch.testing.assert_close(attended.double(), expected, atol=2e-6, rtol=1e-5)


@VARIANTS
def test_an_invariant_prefill_gives_a_query_the_same_bits_in_any_chunk(variant: Variant) -> None:
    pages = Pages([23, 40], 5, 2)
    q = torch.randn(63, 4, HEAD_DIM, generator=generator(5))
    whole = prefill(q, pages, [23, 40], variant, invariant=True)
    late = torch.cat([q[23 - 4 : 23], q[-1:]])
    expected = torch.cat([whole[23 - 4 : 23], whole[-1:]])
    assert torch.equal(prefill(late, pages, [4, 1], variant, invariant=True), expected)
