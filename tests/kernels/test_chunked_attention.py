"""Attention within chunks, on rows that the layer makes of them: a formula in float64, the ops and their launchers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import InvalidParameter
from asyncllm.kernels.quantized_kv import FORMATS
from asyncllm.layers import chunked_attention
from asyncllm.layers.attention import AttentionConfig
from asyncllm.layers.chunked_attention import ChunkedAttention
from asyncllm.layers.quantized_cache import quantized
from asyncllm.layers.step_inputs import StepInputs
from tests.kernels.attention_cases import Pages, Variant, generator, offsets_of, oracle
from tests.kernels.device import DEVICE

CHUNK, BLOCK = 48, 16
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
PLAIN = Variant()


@pytest.fixture(params=["op", "launcher"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the layer plans, and what attends by the plans."""
    if request.param == "op":
        return kernels
    from asyncllm.kernels.triton.attention import decode, plan, prefill

    launchers = SimpleNamespace(
        plan_decode_attention=plan.plan_decode_attention,
        plan_prefill_attention=plan.plan_prefill_attention,
        paged_decode_attention=decode.paged_decode_attention,
        paged_prefill_attention=prefill.paged_prefill_attention,
    )
    monkeypatch.setattr(chunked_attention, "kernels", launchers)
    return launchers


def layer(chunk: int = CHUNK) -> ChunkedAttention:
    with torch.device("meta"):
        config = AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        return ChunkedAttention(0, 32, config, chunk=chunk)


def step_of(pages: Pages, counts: list[int], num_decode: int = 0, **options: Any) -> StepInputs:
    tokens = torch.zeros(sum(counts), dtype=torch.int64, device=DEVICE)
    return StepInputs(
        input_ids=tokens,
        positions=tokens,
        places=tokens,
        num_decode=num_decode,
        q_offsets=offsets_of(counts, str(DEVICE)),
        kv_lens=pages.kv_lens,
        block_tables=pages.block_tables,
        max_q_len=max(counts),
        caches=[pages.cache],
        **options,
    )


def queries(count: int) -> Tensor:
    return torch.randn(count, HEADS, HEAD_DIM, generator=generator(7)).to(DEVICE)


def expected(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """What a query at this position sees of keys and values [S, K, D]."""
    begin = position // CHUNK * CHUNK
    return oracle(q[None], k[begin : position + 1], v[begin : position + 1], position - begin, PLAIN)


def test_a_decode_row_sees_its_chunk_alone(ops: Any) -> None:
    lengths = [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 3 * CHUNK + 20, 0, -1]
    pages = Pages(lengths, BLOCK, KV_HEADS, head_dim=HEAD_DIM, garbage=float("nan"), device=str(DEVICE))
    plan, none = layer()._plans(step_of(pages, [1] * len(lengths), len(lengths)), pages.cache)
    assert none is None
    q, out = queries(len(lengths)), torch.full((len(lengths), HEADS, HEAD_DIM), float("nan"), device=DEVICE)
    ops.paged_decode_attention(q, pages.cache, plan, scale=0.4, out=out)
    for row, length in enumerate(lengths[:-2]):
        torch.testing.assert_close(
            out[row : row + 1].double(), expected(q[row], *pages.contexts[row], length - 1), atol=1e-4, rtol=1e-4
        )
    assert not out[-2].any()


@pytest.mark.parametrize("invariant", [False, True])
def test_a_prompt_that_spans_chunks(ops: Any, invariant: bool) -> None:
    """Rows that begin at the borders of chunks, before, and behind them; one of padding."""
    lengths = [130, CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1, CHUNK + 7, 0]
    counts = [130, CHUNK, 1, 50, 7, 60]
    pages = Pages(lengths, BLOCK, KV_HEADS, head_dim=HEAD_DIM, garbage=float("nan"), device=str(DEVICE))
    step = step_of(pages, counts, batch_invariant=invariant)
    _, plan = layer()._plans(step, pages.cache)
    q, out = queries(sum(counts)), torch.full((sum(counts), HEADS, HEAD_DIM), float("nan"), device=DEVICE)
    ops.paged_prefill_attention(q, pages.cache, plan, scale=0.4, out=out)
    token = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for position in range(length - count, length):
            wanted = (
                expected(q[token], *pages.contexts[row], position) if length else torch.zeros(1, 1, 1, device=DEVICE)
            )
            found = out[token : token + 1].double()
            torch.testing.assert_close(found, wanted.double().expand_as(found), atol=1e-4, rtol=1e-4)
            token += 1


def test_layers_share_plans_by_the_length_of_their_chunks() -> None:
    pages = Pages([100], BLOCK, KV_HEADS, head_dim=HEAD_DIM)
    step = step_of(pages, [1], 1)
    first, second, other = layer(), layer(), layer(32)
    assert first._plans(step, pages.cache)[0] is second._plans(step, pages.cache)[0]
    assert first._plans(step, pages.cache)[0] is not other._plans(step, pages.cache)[0]


def test_blocks_that_chunks_do_not_end_with_are_refused() -> None:
    spec = layer().cache_spec
    assert spec.window == CHUNK
    for each in (spec, quantized(spec, FORMATS["int8"])):
        assert each.parts(16, torch.float32)
        with pytest.raises(InvalidParameter, match="block_size is 32, but the model attends within chunks of 48"):
            each.parts(32, torch.float32)
