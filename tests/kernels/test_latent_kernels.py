"""The kernels of latent attention, interpreted on a CPU and compiled on a GPU, against float64 and the references."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LatentKV, expanded
from tests.kernels import offline
from tests.kernels.device import DEVICE, fresh_seed, poison, random
from tests.kernels.latent_cases import ExpandedCase, LatentCase

if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
    from asyncllm.kernels.triton.latent import decode, fill, plan, prefill
    from asyncllm.kernels.triton.latent import expanded as expanded_launchers
    from asyncllm.kernels.triton.linear import by_head

SCALE = 0.2
HALF = torch.bfloat16


def assert_near(actual: Tensor, expected: Tensor, case: LatentCase) -> None:
    """Each query's and head's error, against the size of what it should be."""
    error = (actual.double().cpu() - expected).norm(dim=-1)
    allowed = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[case.dtype]
    worst = (error / expected.norm(dim=-1).clamp(min=1e-3)).max().item()
    assert worst < allowed, f"{case}: {worst}"


def run_decode(case: LatentCase) -> None:
    cache, tables, kv_lens = case.cache()
    # Tokens of prompts follow those of the rows, and are left alone.
    q_latent, q_rope = (torch.cat([part, torch.full_like(part[:1], torch.nan)]) for part in case.queries())
    work = plan.plan_latent_decode(tables, kv_lens, cache, num_heads=case.heads)
    out = torch.full(q_latent.shape, torch.nan, dtype=case.dtype, device=DEVICE)
    decode.latent_decode_attention(q_latent, q_rope, cache, work, scale=SCALE, out=out)
    assert out[-1].isnan().all()
    assert_near(out[:-1], case.expected(SCALE), case)
    # The plan serves the next layer: the counters of split rows are back at zero.
    again = decode.latent_decode_attention(q_latent, q_rope, cache, work, scale=SCALE)
    assert torch.equal(again[:-1], out[:-1])


def run_prefill(case: LatentCase) -> None:
    cache, tables, kv_lens = case.cache()
    q_latent, q_rope = (torch.cat([torch.full_like(part[:3], torch.nan), part]) for part in case.queries())
    tiles = plan.plan_latent_prefill(
        tables, case.offsets(3), kv_lens, cache, num_heads=case.heads, max_q_len=max(case.counts)
    )
    out = torch.full(q_latent.shape, torch.nan, dtype=case.dtype, device=DEVICE)
    prefill.latent_prefill_attention(q_latent, q_rope, cache, tiles, scale=SCALE, out=out)
    assert out[:3].isnan().all()
    assert_near(out[3:], case.expected(SCALE), case)


@pytest.mark.parametrize(
    "case",
    [
        LatentCase([1, 70, 300], heads=16, rank=64, rope=16, block_size=64, dtype=HALF),
        LatentCase([70, 0, 5, -1, -1], heads=5, rank=40, rope=8),
        LatentCase([2100], heads=3, rank=16, rope=8, block_size=32, dtype=HALF),
        LatentCase([500, 3, 64, 65], heads=20, rank=24, rope=8, block_size=48),
        LatentCase([130, 33], heads=40, rank=256, rope=32, block_size=64, dtype=HALF),
        LatentCase([100], heads=2, rank=512, rope=64, block_size=64, dtype=torch.float16),
    ],
    ids=["plain", "padding", "split", "uneven", "minicpm", "deepseek"],
)
def test_decode(case: LatentCase) -> None:
    run_decode(case)


@pytest.mark.parametrize(
    "case",
    [
        LatentCase([70, 130], [70, 3], heads=4, rank=64, rope=16, block_size=64, dtype=HALF),
        LatentCase([40, 0, 90, 1], [40, 2, 9, 1], heads=6, rank=40, rope=8),
        LatentCase([200, 20], [20, 20], heads=3, rank=16, rope=8, block_size=48),
        LatentCase([9], [9], heads=130, rank=32, rope=8, dtype=HALF),
        LatentCase([70], [9], heads=2, rank=512, rope=64, block_size=64, dtype=torch.float16),
    ],
    ids=["plain", "padding", "odd", "many heads", "deepseek"],
)
def test_prefill(case: LatentCase) -> None:
    run_prefill(case)


def test_a_query_gets_the_same_bits_however_its_prompt_is_cut() -> None:
    case = LatentCase([150, 90], [150, 90], heads=5, rank=32, rope=8, block_size=64, dtype=HALF)
    cache, tables, _ = case.cache()
    q_latent, q_rope = case.queries()

    def attend(first: int, last: int, *, behind: bool = False) -> Tensor:
        """Queries first to last - 1 of row 0, behind some of row 1 if asked."""
        order, ends, counts = ([1, 0], [90, last], [20, last - first]) if behind else ([0], [last], [last - first])
        tiles = plan.plan_latent_prefill(
            tables[order],
            LatentCase(ends, counts).offsets(),
            torch.tensor(ends, dtype=torch.int32, device=DEVICE),
            cache,
            num_heads=case.heads,
            max_q_len=max(counts),
            invariant=True,
        )
        parts = (
            torch.cat([part[150:170], part[first:last]]) if behind else part[first:last] for part in (q_latent, q_rope)
        )
        return prefill.latent_prefill_attention(*parts, cache, tiles, scale=SCALE)[-(last - first) :]

    whole = attend(0, 150)
    assert torch.equal(attend(0, 37), whole[:37])
    assert torch.equal(attend(37, 101, behind=True), whole[37:101])
    for position in (0, 63, 64, 149):
        assert torch.equal(attend(position, position + 1), whole[position : position + 1])


def run_expanded(case: ExpandedCase, ops: Any) -> None:
    cache, tables, kv_lens = case.cache()
    rows = list(zip(case.counts, case.lengths, strict=True))
    work = ops.plan_expanded_prefill(tables, case.offsets(3), kv_lens, cache, rows, num_heads=case.heads)
    latents, keys = ops.gather_lines(cache.pages, work, rank=case.rank)
    lines = torch.cat(case.lines()).to(DEVICE)
    assert torch.equal(latents, lines[:, : case.rank])
    assert torch.equal(keys, lines[:, case.rank :])
    q, kv, _ = case.expanded()
    # Tokens of other rows stand in front, and are left alone.
    q = torch.cat([torch.full_like(q[:1].expand(3, -1, -1), torch.nan), q])
    kv = torch.cat([kv, torch.full_like(kv[:1].expand(40, -1, -1), torch.nan)])[: len(kv)]
    out = torch.full((*q.shape[:2], case.value), torch.nan, dtype=case.dtype, device=DEVICE)
    ops.expanded_prefill_attention(q, kv, keys, work, scale=SCALE, out=out)
    assert out[:3].isnan().all()
    assert_near(out[3:], case.expected_values(SCALE), case)


@pytest.mark.parametrize("ops", ["references", "launchers"])
@pytest.mark.parametrize(
    "case",
    [
        ExpandedCase([70, 150], [70, 3], dtype=HALF),
        ExpandedCase([40, 9, 1], [39, 9, 1], heads=3, rank=40, block_size=48, nope=24, value=40),
        ExpandedCase([200], [140], heads=2, rank=16, rope=16, nope=64, value=32, dtype=torch.float16),
    ],
    ids=["plain", "float32", "long"],
)
def test_expanded_prefill(case: ExpandedCase, ops: str) -> None:
    run_expanded(case, expanded if ops == "references" else expanded_launchers)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "nope", "rank", "rope"), [(5, 6, 40, 8), (40, 3, 24, 6), (1, 8, 512, 64)])
def test_fill(heads: int, nope: int, rank: int, rope: int, dtype: torch.dtype, interleaved: bool) -> None:
    places = torch.tensor([7, -1, 12, 3], device=DEVICE)
    q, kv = random(4, heads, nope + rope, dtype=dtype), random(4, rank + rope, seed=1, dtype=dtype)
    norm = random(rank, seed=2, dtype=dtype)
    rotation = kernels.rotation(torch.tensor([0, 5, 9, 70], device=DEVICE), random(rope // 2, seed=3).abs())
    expected = q.clone()
    caches = [LatentKV(torch.full((4, 4, rank + rope), 7.0).to(DEVICE, dtype), rank) for _ in "ab"]
    options = {"norm": norm, "eps": 1e-5, "interleaved": interleaved}
    there = places >= 0
    some = kernels.Rotation(*(part[there] for part in rotation))
    kernels.rope_fill_latent.reference(
        expected, kv, rotation, LatentKV(torch.empty_like(kv)[None], rank), torch.arange(4, device=DEVICE), **options
    )
    kernels.rope_fill_latent.reference(expected[there].clone(), kv[there], some, caches[0], places[there], **options)
    fill.rope_fill_latent(q, kv, rotation, caches[1], places, **options)
    # Sums of squares are taken in another order, which the rounding may show.
    step = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(q, expected, rtol=step, atol=step)
    torch.testing.assert_close(caches[1].pages, caches[0].pages, rtol=step, atol=step)
    untouched = [place for place in range(16) if place not in places.tolist()]
    assert (caches[1].lines[untouched] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_products_by_head(tokens: int, transposed: bool, dtype: torch.dtype) -> None:
    """Of a part of each head's features, as the layer has them."""
    x = random(tokens, 3, 40, dtype=dtype)[..., :33]
    weight = random(3, 50, 33, seed=1, dtype=dtype) if not transposed else random(3, 33, 50, seed=1, dtype=dtype).mT
    weight = weight[:, :44]
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    step = 1e-5 if dtype == torch.float32 else 1.6e-2
    for product in (by_head.linear_by_head, by_head.linear_by_head_invariant):
        poison(expected.shape, dtype=dtype)
        y = product(x, weight)
        torch.testing.assert_close(y.double(), expected, rtol=step, atol=step)
        out = torch.full_like(y, torch.nan)
        assert torch.equal(product(x, weight, out=out), y)
    assert torch.equal(by_head.linear_by_head_invariant(x[-1:], weight), y[-1:])


def test_what_kernels_do_not_take_is_refused() -> None:
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    for rank, rope, block_size, message in (
        (520, 8, 64, "kv_lora_rank up to 512"),
        (64, 12, 64, "multiples of 8, not 64 and 12"),
        (64, 8, 40, "multiple of 16 tokens, not of 40"),
    ):
        cache = LatentKV(torch.zeros(1, block_size, rank + rope, device=DEVICE), rank)
        with pytest.raises(ValueError, match=message):
            plan.plan_latent_decode(tables, tables[0], cache, num_heads=1)
        with pytest.raises(ValueError, match=message):
            plan.plan_latent_prefill(tables, tables[0], tables[0], cache, num_heads=1, max_q_len=1)
    cache = LatentKV(torch.zeros(1, 16, 24, device=DEVICE), 16)
    with pytest.raises(ValueError, match=r"need a cache of torch\.bfloat16"):
        fill.rope_fill_latent(
            random(1, 1, 8, dtype=HALF),
            random(1, 24, dtype=HALF),
            kernels.rotation(tables[0].long(), random(4)),
            cache,
            tables[0],
            norm=random(16, dtype=HALF),
            eps=1e-6,
            interleaved=True,
        )


@pytest.mark.timeout(180)
def test_configs_compile_for_hopper(compile_kernels: offline.Compile) -> None:
    """Few spilled registers (Triton 3.6 spills more than 3.7), lines pipelined as deep as the config says, and as many
    blocks per multiprocessor as
    the grid counts on."""
    from tests.kernels import compile_latent

    results = compile_kernels("compile_latent")
    for case in compile_latent.CASES:
        result, shape = results[case.name], case.constexprs
        assert result.spilled_bytes <= 48, case.name
        assert result.shared_bytes <= offline.MAX_SHARED_BYTES, case.name
        if "RANK" not in shape or "TILE" not in shape:
            continue
        itemsize = 4 if "fp32" in case.name else 2
        tile = shape["TILE"] * (shape["RANK"] + shape["ROPE"]) * itemsize
        assert result.shared_bytes >= (case.num_stages - 1) * tile, case.name
        assert (result.wgmma > 0) == (itemsize == 2), case.name
        if case.name.startswith("decode"):
            blocks = int(case.name.rsplit("-", 1)[1])
            assert blocks * (result.shared_bytes + 1024) <= 228 * 1024, case.name
            assert blocks * result.registers * 32 * case.num_warps <= 65536, case.name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 512, 64), (128, 512, 64), (40, 256, 32), (3, 40, 8)])
def test_attention_on_gpu(heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    seed = fresh_seed()
    lengths = torch.randint(0, 3000, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    for block_size in (64, 16):
        run_decode(LatentCase([*lengths, -1], [], heads, rank, rope, block_size, dtype, seed))
        run_prefill(LatentCase([300, 900, 17], [300, 1, 16], heads, rank, rope, block_size, dtype, seed))
        sizes = {"nope": 128, "value": 128} if rank == 512 else {"nope": 64, "value": 48}
        case = ExpandedCase([700, 900, 17], [300, 900, 16], heads, rank, rope, block_size, dtype, seed, **sizes)
        run_expanded(case, expanded_launchers)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[4096] * 64, [16384] * 16, [30000], [1, 20000, 5, 0, 0]], ids=lambda n: str(n[:3]))
def test_decode_of_deepseek_on_gpu(lengths: list[int]) -> None:
    run_decode(LatentCase(lengths, [], 16, 512, 64, 64, HALF, fresh_seed()))


@pytest.mark.gpu
def test_a_captured_decode_follows_the_lengths() -> None:
    case = LatentCase([900, 64, 3000, 1], [], 16, 512, 64, 64, HALF, fresh_seed())
    cache, tables, kv_lens = case.cache()
    q_latent, q_rope = case.queries()
    out = torch.empty(q_latent.shape, dtype=HALF, device=DEVICE)

    def step() -> None:
        work = kernels.plan_latent_decode(tables, kv_lens, cache, num_heads=case.heads)
        for _ in range(3):
            kernels.latent_decode_attention(q_latent, q_rope, cache, work, scale=SCALE, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([900, 64, 3000, 1], [17, 64, 2000, 0]):
        kv_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        work = kernels.plan_latent_decode(tables, kv_lens, cache, num_heads=case.heads)
        assert torch.equal(out, kernels.latent_decode_attention(q_latent, q_rope, cache, work, scale=SCALE))
