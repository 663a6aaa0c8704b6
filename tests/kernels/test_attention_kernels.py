"""The kernels of paged attention, interpreted on a CPU and compiled on a GPU, against float64."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV
from tests.kernels import offline
from tests.kernels.attention_cases import (
    SCALE,
    Pages,
    Variant,
    expected_decode,
    expected_prefill,
    generator,
    offsets_of,
    oracle,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
    from asyncllm.kernels.triton.attention import decode, prefill
    from asyncllm.kernels.triton.attention import plan as planning


FOREIGN = 3
"""Tokens in front of those of a prefill plan's rows."""

PLAIN = Variant()
ALL = Variant(window=100, softcap=2.0, sinks=True, alibi=True)


@dataclass(frozen=True)
class Case:
    """A batch for a kernel. The pool holds NaN where no row owns it, the outputs are NaN before, q is part of qkv."""

    lengths: list[int]
    counts: list[int] = field(default_factory=list)
    """Queries per row, for prefill."""
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    block_size: int = 64
    variant: Variant = PLAIN
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def tensors(self) -> tuple[Pages, Tensor, Tensor]:
        """(pages, q, out)."""
        pages = Pages(
            self.lengths,
            self.block_size,
            self.heads[1],
            self.dtype,
            head_dim=self.head_dim,
            garbage=float("nan"),
            device=DEVICE,
            seed=self.seed,
        )
        tokens = sum(self.counts) or len(self.lengths)
        qkv = torch.randn(tokens, self.heads[0] + 2 * self.heads[1], self.head_dim, generator=generator(self.seed + 77))
        q = qkv.to(self.dtype).to(DEVICE)[:, : self.heads[0]]
        out = torch.full((tokens + 1, *q.shape[1:]), float("nan"), dtype=self.dtype, device=DEVICE)
        return pages, q, out[1:]


def assert_near(actual: Tensor, expected: Tensor, case: Case) -> None:
    """Each query's and head's error, against the size of what it should be."""
    error = (actual.double() - expected).norm(dim=-1)
    # Weights and results are rounded to the type, each by at most 2^-9 (bfloat16) of their size.
    allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[case.dtype]
    worst = (error / expected.norm(dim=-1).clamp(min=1e-3)).max().item()
    assert worst < allowed, f"{case}: {worst}"


def run_decode(case: Case) -> None:
    pages, q, out = case.tensors()
    variant = case.variant
    plan = planning.plan_decode_attention(
        pages.block_tables, pages.kv_lens, pages.cache, num_heads=case.heads[0], window=variant.window
    )
    extras = variant.extras(case.heads[0], DEVICE)
    decode.paged_decode_attention(q, pages.cache, plan, out=out, **extras)
    assert_near(out, expected_decode(q, pages, variant), case)
    # The plan serves the next layer: the counters of split rows are back at zero.
    again = decode.paged_decode_attention(q, pages.cache, plan, **extras)
    assert torch.equal(again, out)


def run_prefill(case: Case, *, invariant: bool = False) -> Tensor:
    pages, q, out = case.tensors()
    variant = case.variant
    plan = planning.plan_prefill_attention(
        pages.block_tables,
        offsets_of(case.counts, DEVICE, base=FOREIGN),
        pages.kv_lens,
        pages.cache,
        num_heads=case.heads[0],
        max_q_len=max(case.counts),
        window=variant.window,
        invariant=invariant,
    )
    extras = variant.extras(case.heads[0], DEVICE)
    # Tokens of other rows stand in front, and are left alone.
    q, out = (
        torch.cat([torch.full_like(tensor[:1].expand(FOREIGN, -1, -1), torch.nan), tensor]) for tensor in (q, out)
    )
    prefill.paged_prefill_attention(q, pages.cache, plan, out=out, **extras)
    assert out[:FOREIGN].isnan().all()
    assert_near(out[FOREIGN:], expected_prefill(q[FOREIGN:], pages, case.counts, variant), case)
    again = prefill.paged_prefill_attention(q, pages.cache, plan, **extras)
    assert torch.equal(again[FOREIGN:], out[FOREIGN:])


@pytest.mark.parametrize(
    "case",
    [
        Case([1, 130, 300]),
        Case([70, 0, 5], heads=(6, 2), head_dim=80, dtype=torch.float32, variant=Variant(sinks=True)),
        Case([2100], heads=(3, 1), head_dim=16, variant=Variant(alibi=True)),
        Case([1500, 3, 900, 64, 65], heads=(2, 2), head_dim=16, variant=Variant(softcap=2.0)),
        Case([700, 40, 101], heads=(4, 1), head_dim=96, block_size=48, variant=ALL),
        Case([130, 33], heads=(20, 1), head_dim=256, dtype=torch.float16, variant=Variant(window=40)),
        Case([40, 9], heads=(3, 1), head_dim=512),
        Case([60, 3], heads=(2, 1), head_dim=8, block_size=128),
    ],
    ids=["plain", "padding", "split", "uneven", "all", "wide", "widest", "small"],
)
def test_decode_kernel(case: Case) -> None:
    run_decode(case)


@pytest.mark.parametrize("lengths", [[130, 0, 300, -1, -1], [-1, -1], [70] + [-1] * 40], ids=["some", "all", "many"])
def test_absent_rows_of_the_decode_kernel(lengths: list[int]) -> None:
    """They have no token: tokens behind those of the rows that are there belong to prompts, and are left alone."""
    there = [length for length in lengths if length >= 0]
    pages, q, out = Case(there or [1]).tensors()
    absent = len(lengths) - len(there)
    tables = torch.cat(
        [pages.block_tables[: len(there)], pages.block_tables.new_zeros(absent, pages.block_tables.shape[1])]
    )
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = torch.cat([q[: len(there)], torch.full_like(q[:1], torch.nan)])
    out = torch.cat([out[: len(there)], torch.full_like(out[:1], torch.nan)])
    plan = planning.plan_decode_attention(tables, kv_lens, pages.cache, num_heads=q.shape[1])
    for _ in range(2):
        decode.paged_decode_attention(q, pages.cache, plan, scale=SCALE, out=out)
        assert out[len(there) :].isnan().all()
        if there:
            assert_near(out[: len(there)], expected_decode(q[: len(there)], pages, PLAIN), Case(there))
        out[: len(there)] = torch.nan


def test_tokens_of_padding_are_a_row_of_the_prefill_kernel() -> None:
    """Its length is 0: it reads nothing, and its results are zeros. Rows without tokens follow."""
    pages, q, out = Case([70, 130], [70, 3]).tensors()
    q = torch.cat([q, torch.full_like(q[:20], torch.nan)])
    out = torch.full_like(q, torch.nan)
    offsets = torch.tensor([0, 70, 73, 93, 93, 93], dtype=torch.int32, device=DEVICE)
    kv_lens = torch.cat([pages.kv_lens, pages.kv_lens.new_zeros(3)])
    tables = torch.cat([pages.block_tables, pages.block_tables.new_zeros(3, pages.block_tables.shape[1])])
    plan = planning.plan_prefill_attention(tables, offsets, kv_lens, pages.cache, num_heads=q.shape[1], max_q_len=93)
    prefill.paged_prefill_attention(q, pages.cache, plan, scale=SCALE, out=out)
    assert_near(out[:73], expected_prefill(q[:73], pages, [70, 3], PLAIN), Case([70, 130], [70, 3]))
    assert torch.equal(out[73:], torch.zeros_like(out[73:]))


@pytest.mark.parametrize(
    "case",
    [
        Case([70, 130], [70, 3], heads=(4, 1), head_dim=16),
        Case([40, 90, 1], [40, 9, 1], heads=(6, 2), head_dim=80, dtype=torch.float32, variant=Variant(sinks=True)),
        Case([330, 20], [50, 20], heads=(3, 1), head_dim=16, block_size=48, variant=ALL),
        Case([200], [150], heads=(1, 1), head_dim=64, dtype=torch.float16, variant=Variant(alibi=True, window=30)),
        Case([100], [100], heads=(2, 1), head_dim=256, variant=Variant(softcap=2.0)),
        Case([50, 20], [30, 20], heads=(2, 1), head_dim=512),
    ],
    ids=["plain", "float32", "all", "window", "wide", "widest"],
)
def test_prefill_kernel(case: Case) -> None:
    run_prefill(case)


def test_rows_of_a_prefill_without_keys_are_zeros() -> None:
    pages, q, out = Case([0, 20], heads=(4, 2), head_dim=16).tensors()
    plan = planning.plan_prefill_attention(
        pages.block_tables, offsets_of([1, 1], DEVICE), pages.kv_lens, pages.cache, num_heads=4, max_q_len=1
    )
    prefill.paged_prefill_attention(q, pages.cache, plan, scale=SCALE, out=out)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert_near(out[1:], expected_decode(q, pages, PLAIN)[1:], Case([20]))


@pytest.mark.parametrize("variant", [PLAIN, ALL], ids=["plain", "all"])
def test_a_query_gets_the_same_bits_however_its_prompt_is_cut(variant: Variant) -> None:
    length, heads = 150, (4, 1)
    pages, _, _ = Case([length, 90], heads=heads, head_dim=16).tensors()
    q = torch.randn(length, heads[0], 16, generator=generator(5)).to(torch.bfloat16).to(DEVICE)

    def attend(first: int, last: int, row: int = 0) -> Tensor:
        """Queries first to last - 1 of the row, behind a row of another sequence if `row` is 1."""
        order = [1, 0] if row else [0]
        counts = [20, last - first] if row else [last - first]
        plan = planning.plan_prefill_attention(
            pages.block_tables[order],
            offsets_of(counts, DEVICE),
            torch.tensor([90, last] if row else [last], dtype=torch.int32, device=DEVICE),
            pages.cache,
            num_heads=heads[0],
            max_q_len=max(counts),
            window=variant.window,
            invariant=True,
        )
        rows = torch.cat([q[:20], q[first:last]]) if row else q[first:last]
        extras = variant.extras(heads[0], DEVICE)
        return prefill.paged_prefill_attention(rows, pages.cache, plan, **extras)[-(last - first) :]

    whole = attend(0, length)
    assert torch.equal(attend(0, 37), whole[:37])
    assert torch.equal(attend(37, 101, row=1), whole[37:101])
    assert torch.equal(attend(101, length), whole[101:])
    for position in (0, 63, 64, 127, 149):
        assert torch.equal(attend(position, position + 1), whole[position : position + 1])


@pytest.mark.parametrize("lengths", [[1], [0, 0, 1], [640] * 3, [64 * 40], [64 * 300, 1, 64 * 7 + 1], [100] * 300])
@pytest.mark.parametrize("window", [None, 200])
def test_a_decode_plan_gives_every_tile_to_one_block(lengths: list[int], window: int | None) -> None:
    heads = 2
    cache = PagedKV.over(torch.zeros(2, 1, heads, 64, 128, dtype=torch.bfloat16, device=DEVICE))
    width = max(lengths) // 64 + 2
    tables = torch.randint(1000, (len(lengths), width), dtype=torch.int32, device=DEVICE)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = planning.plan_decode_attention(tables, kv_lens, cache, num_heads=2 * heads, window=window)
    size = plan.config.tile
    header = planning.HEADER.value
    work = plan.work.tolist()
    share = work[0]
    entry_size = planning.ENTRY.value
    counters = header + entry_size * plan.grid
    infos = [work[counters + plan.grid + 4 * row :][:4] for row in range(len(lengths))]
    per_head = [info[1] for info in infos]
    seen = []
    for block in range(plan.grid):
        row, head, tile, left, *info = work[header + entry_size * block :][:8]
        assert 0 <= left <= share
        if left:
            assert info == infos[row]
            page = work[header + entry_size * block + planning.ENTRY_PAGE.value]
            assert lengths[row] == 0 or page == tables[row, (info[2] + tile) * size // 64]
        for _ in range(left):
            seen.append((row, head, tile))
            tile += 1
            if tile == per_head[row]:
                row, head, tile = (row, head + 1, 0) if head + 1 < heads else (row + 1, 0, 0)
    assert seen == [(row, h, t) for row in range(len(lengths)) for h in range(heads) for t in range(per_head[row])]
    for length, tiles in zip(lengths, per_head, strict=True):
        visible = -(-length // size) - (max(length - window, 0) // size if window else 0)
        assert max(visible, 1) <= tiles < max(visible, 1) + share
    assert work[counters : counters + plan.grid] == [0] * plan.grid


@pytest.mark.parametrize("invariant", [False, True])
def test_a_prefill_plan_has_every_query_once_and_long_rows_first(invariant: bool) -> None:
    lengths, counts = [40, 700, 90, 8], [40, 300, 1, 0]
    cache = PagedKV.over(torch.zeros(2, 1, 2, 64, 128, dtype=torch.bfloat16, device=DEVICE))
    plan = planning.plan_prefill_attention(
        torch.zeros(4, 1, dtype=torch.int32, device=DEVICE),
        offsets_of(counts, DEVICE, base=FOREIGN),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        cache,
        num_heads=2,
        max_q_len=300,
        invariant=invariant,
    )
    entries = plan.entries[1 : 1 + int(plan.entries[0, 0])].tolist()
    assert plan.config == planning.prefill_configs(cache)[0 if invariant else 1]
    assert [row for row, *_ in entries] == sorted((row for row, *_ in entries), key=lengths.__getitem__, reverse=True)
    queries = []
    for row, first, count, position in entries:
        start = FOREIGN + sum(counts[:row])
        assert position == lengths[row] - counts[row] + first - start
        queries += [(row, query - start) for query in range(first, first + count)]
    assert sorted(queries) == [(row, query) for row in range(4) for query in range(counts[row])]
    positions = [position for row, _, _, position in entries if row == 1]
    assert positions == sorted(positions, reverse=True)


def test_what_kernels_do_not_take_is_refused() -> None:
    def plan(block_size: int, head_dim: int) -> None:
        cache = PagedKV.over(torch.zeros(2, 1, 1, block_size, head_dim, device=DEVICE))
        tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        planning.plan_decode_attention(tables, tables[0], cache, num_heads=1)

    with pytest.raises(ValueError, match=r"multiple of 16 tokens, not of 40\. Set block_size"):
        plan(40, 64)
    with pytest.raises(ValueError, match="head_dim that is a multiple of 8 up to 512, not 520"):
        plan(64, 520)
    pages, q, _ = Case([3], heads=(4, 2), head_dim=16).tensors()
    decode_plan = planning.plan_decode_attention(pages.block_tables, pages.kv_lens, pages.cache, num_heads=4)
    with pytest.raises(ValueError, match="Sinks are float32 \\[4\\], one per query head"):
        decode.paged_decode_attention(q, pages.cache, decode_plan, scale=1.0, sinks=torch.zeros(2))
    prefill_plan = planning.plan_prefill_attention(
        pages.block_tables, offsets_of([1], DEVICE), pages.kv_lens, pages.cache, num_heads=2, max_q_len=1
    )
    with pytest.raises(ValueError, match="The plan is for 2 query heads, and q has 4"):
        prefill.paged_prefill_attention(q, pages.cache, prefill_plan, scale=1.0)


@pytest.mark.timeout(120)
def test_configs_compile_for_hopper(compile_kernels: offline.Compile) -> None:
    """Next to no spilled register; K and V pipelined as deep as the config says, which the block id that is loaded an
    iteration ahead decides; prompts on the wide matrix instructions; as many blocks per multiprocessor as the grid
    counts on."""
    from tests.kernels import compile_attention

    results = compile_kernels("compile_attention")
    for case in compile_attention.CASES:
        result, shape = results[case.name], case.constexprs
        # ptxas keeps up to four registers in local memory, outside the loop, where that makes room for one more block.
        assert result.spilled_bytes <= 16, case.name
        assert result.shared_bytes <= offline.MAX_SHARED_BYTES, case.name
        itemsize = 4 if "fp32" in case.name else 2
        pair = 2 * shape["TILE"] * shape["PADDED"] * itemsize
        assert result.shared_bytes >= (case.num_stages - 1) * pair, case.name
        if itemsize == 2:
            # Heads of 512 features leave registers for 32 queries at a time, and the wide instructions take 64.
            wide = case.name.startswith("prefill") and shape["PADDED"] < 512
            assert (result.wgmma > 0) == wide, case.name
        if case.name.startswith("decode"):
            # A multiprocessor has 228 KiB of shared memory, of which each block takes 1 KiB more, and 65536 registers.
            blocks = int(case.name.removesuffix("-all").rsplit("-", 1)[1])
            assert blocks * (result.shared_bytes + 1024) <= 228 * 1024, case.name
            assert blocks * result.registers * 32 * case.num_warps <= 65536, case.name


# What follows needs a GPU.

LLAMA = {"heads": (32, 8), "head_dim": 128}


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(3), "little")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("variant", [PLAIN, ALL], ids=["plain", "all"])
def test_decode_on_gpu(head_dim: int, variant: Variant) -> None:
    seed = fresh_seed()
    lengths = torch.randint(0, 3000, (9,), generator=generator(seed)).tolist()
    for heads, block_size in (((32, 8), 64), ((7, 1), 16), ((4, 4), 128)):
        run_decode(Case(lengths, [], heads, head_dim, block_size, variant, seed=seed))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths", [[256], [4096], [30000], [1024] * 64, [1, 20000, 5, 0, 0]], ids=lambda n: str(n[:3])
)
def test_decode_of_llama_on_gpu(lengths: list[int]) -> None:
    run_decode(Case(lengths, seed=fresh_seed(), **LLAMA))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("variant", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("invariant", [False, True])
def test_prefill_on_gpu(head_dim: int, variant: Variant, invariant: bool) -> None:
    seed = fresh_seed()
    for heads, block_size in (((32, 8), 64), ((7, 1), 16)):
        for counts in ([300, 1, 17], [40, 30, 64]):
            lengths = [n + int(torch.randint(0, 900, (1,), generator=generator(seed))) for n in counts]
            case = Case(lengths, counts, heads, head_dim, block_size, variant, seed=seed)
            run_prefill(case, invariant=invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_other_types_on_gpu(dtype: torch.dtype, head_dim: int) -> None:
    seed = fresh_seed()
    run_decode(Case([1, 700, 65], head_dim=head_dim, dtype=dtype, seed=seed))
    run_prefill(Case([80, 700, 65], [80, 5, 65], head_dim=head_dim, dtype=dtype, seed=seed))


@pytest.mark.gpu
def test_a_captured_decode_follows_the_lengths() -> None:
    pages, q, out = Case([900, 64, 3000, 1], seed=fresh_seed(), **LLAMA).tensors()
    kv_lens, tables = pages.kv_lens.clone(), pages.block_tables.clone()

    def step() -> None:
        plan = kernels.plan_decode_attention(tables, kv_lens, pages.cache, num_heads=LLAMA["heads"][0])
        for _ in range(3):
            kernels.paged_decode_attention(q, pages.cache, plan, scale=SCALE, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for order, lengths in (
        ([0, 1, 2, 3], [900, 64, 3000, 1]),
        ([2, 0, 1, 3], [2999, 1, 0, 0]),
        ([1, 3, 0, 2], [64, 1, -1, -1]),
        ([0, 1, 2, 3], [-1] * 4),
    ):
        kv_lens.copy_(torch.tensor(lengths))
        tables.copy_(pages.block_tables[order])
        out.fill_(float("nan"))
        graph.replay()
        for row, (source, length) in enumerate(zip(order, lengths, strict=True)):
            k, v = (part[:length] for part in pages.contexts[source])
            case = Case([length], **LLAMA)
            if length < 0:
                assert out[row].isnan().all()
            elif length:
                assert_near(out[row : row + 1], oracle(q[row : row + 1], k, v, length - 1, PLAIN), case)
            else:
                assert torch.equal(out[row], torch.zeros_like(out[row]))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [PLAIN, ALL], ids=["plain", "all"])
def test_tokens_that_see_each_other_on_gpu(variant: Variant) -> None:
    seed = fresh_seed()
    pages = Pages([700, 523], 64, 2, torch.bfloat16, head_dim=64, device="cuda", seed=seed)
    q = torch.randn(256, 8, 64, generator=generator(seed)).to("cuda", torch.bfloat16)
    attended = kernels.paged_joint_attention(
        q, pages.cache, pages.block_tables[1], kv_len=523, window=variant.window, **variant.extras(8, "cuda")
    )
    expected = oracle(q, *pages.contexts[1], 523 - 256, variant, joint=True)
    torch.testing.assert_close(attended.double(), expected, atol=2e-2, rtol=2e-2)
