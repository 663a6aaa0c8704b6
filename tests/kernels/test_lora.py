"""LoRA by row: the reference against merged weights, the kernels against the reference."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LoRAWeights, RowGroups, group_rows
from asyncllm.kernels.lora import GROUP
from asyncllm.kernels.triton import lora as launchers
from asyncllm.kernels.triton import lora_groups, lora_rows
from asyncllm.kernels.triton.lora_rows import MAX_RANK, splits_of
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_repeatable, fresh_seed, poison, random

RANKS = [5, 16, 0, 32, 1]
"""Of the adapters in five slots; one has nothing for the layer."""


def weights(seed: int, sizes: tuple[int, ...], k: int, *, rank: int = 32, dtype: torch.dtype) -> LoRAWeights:
    """Adapters in slots that are views of one tensor, at odd places, with NaN in between."""
    out = sum(sizes)
    flat = torch.full((len(RANKS), 8 + (len(sizes) * k + out) * rank), torch.nan, dtype=dtype, device=DEVICE)
    a = flat[:, 8 : 8 + len(sizes) * rank * k].view(len(RANKS), -1, k)
    b = flat[:, 8 + len(sizes) * rank * k :].view(len(RANKS), out, rank)
    a.zero_()
    b.zero_()
    for slot, own in enumerate(RANKS):
        for part in range(len(sizes)):
            a[slot, part * rank :][:own] = random(own, k, seed=seed + slot, dtype=dtype)
        b[slot, :, :own] = random(out, own, seed=seed + 10 + slot, dtype=dtype)
    ranks = torch.full((len(RANKS), 3), 99, dtype=torch.int32, device=DEVICE)
    ranks[:, 1] = torch.tensor(RANKS)
    return LoRAWeights(a, b, ranks[:, 1], sizes)


def add_reference(
    y: Tensor, x: Tensor, slots: Tensor, lora: LoRAWeights, num_single: int = 0, groups: RowGroups | None = None
) -> Tensor:
    shrunk = kernels.shrink_lora.reference(x, slots, lora, num_single=num_single, groups=groups)
    return kernels.expand_lora.reference(y, shrunk, slots, lora, groups=groups)


def add(
    y: Tensor, x: Tensor, slots: Tensor, lora: LoRAWeights, num_single: int = 0, groups: RowGroups | None = None
) -> Tensor:
    shrunk = launchers.shrink_lora(x, slots, lora, num_single=num_single, groups=groups)
    return launchers.expand_lora(y, shrunk, slots, lora, groups=groups)


def slots_of(tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, len(RANKS), (tokens,), generator=generator).to(torch.int32).to(DEVICE)


def test_the_reference_is_the_product_with_merged_weights() -> None:
    sizes, k, tokens = (24, 8, 8), 40, 13
    lora = weights(1, sizes, k, dtype=torch.float32)
    base, x, slots = random(sum(sizes), k), random(tokens, k, seed=2), slots_of(tokens, 3)
    y = x @ base.t()
    expected = []
    for row, slot in enumerate(slots.tolist()):
        merged = base.clone()
        if slot >= 0:
            for part, rows in enumerate((slice(0, 24), slice(24, 32), slice(32, 40))):
                merged[rows] += lora.b[slot, rows] @ lora.a[slot, part * 32 : part * 32 + 32]
        expected.append(x[row] @ merged.t())
    found = add_reference(y, x, slots, lora)
    assert found is y
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "num_single", "num_grouped", "sizes", "k", "rank", "dtype"),
    [
        (1, 1, 0, (24,), 40, 32, torch.float32),
        (21, 0, 0, (72, 8, 8, 3), 1100, 32, torch.bfloat16),
        (21, 21, 0, (600, 30), 90, 32, torch.float16),
        (70, 0, 0, (150, 150), 130, 32, torch.bfloat16),
        (70, 5, 0, (150, 16), 1030, 32, torch.bfloat16),
        (70, 0, 66, (24,), 1030, 32, torch.float16),
        (70, 0, 70, (300, 33), 1030, 32, torch.bfloat16),
        (3, 0, 3, (300, 33), 90, 32, torch.float32),
        (3, 3, 0, (70, 33), 90, MAX_RANK, torch.bfloat16),
        (3, 0, 3, (70, 33), 90, MAX_RANK, torch.bfloat16),
        (3, 0, 3, (70, 33), 90, 4 * MAX_RANK, torch.bfloat16),
        (70, 70, 0, (24,), 40, 4 * MAX_RANK, torch.float32),
    ],
)
def test_the_kernels_do_as_the_reference(
    tokens: int, num_single: int, num_grouped: int, sizes: tuple[int, ...], k: int, rank: int, dtype: torch.dtype
) -> None:
    seed = fresh_seed()
    lora = weights(seed, sizes, k, rank=rank, dtype=dtype)
    x, y, slots = random(tokens, k, seed=seed, dtype=dtype), random(tokens, sum(sizes), seed=1, dtype=dtype), None
    slots = slots_of(tokens, seed)

    def run() -> Tensor:
        poison((num_grouped * (1 + GROUP),), dtype=torch.int32)
        groups = lora_groups.group_rows(slots[:num_grouped]) if num_grouped else None
        poison((max(splits_of(k), 4), tokens, len(sizes) * rank), dtype=torch.float32)
        return add(y.clone(), x, slots, lora, num_single, groups)

    found, expected = assert_repeatable(run), add_reference(y.clone(), x, slots, lora)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * k**0.5)
    assert torch.equal(found[slots == -1], y[slots == -1]), "rows without an adapter are not touched"
    changed = [slot for slot in slots.tolist() if slot >= 0 and lora.ranks[slot]]
    assert torch.equal(found, y) == (not changed)


@pytest.mark.parametrize(
    ("tokens", "num_single", "num_grouped", "size", "rank", "dtype"),
    [
        (1, 1, 0, 24, 32, torch.float32),
        (21, 21, 0, 300, 32, torch.bfloat16),
        (21, 21, 0, 70, MAX_RANK, torch.float16),
        (70, 66, 0, 33, 32, torch.bfloat16),
        (21, 21, 0, 33, 4 * MAX_RANK, torch.float32),
        (70, 0, 70, 33, 32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("gelu", [False, True])
def test_the_gate_follows_the_additions(
    tokens: int, num_single: int, num_grouped: int, size: int, rank: int, dtype: torch.dtype, gelu: bool
) -> None:
    seed, k = fresh_seed(), 90
    lora = weights(seed, (size, size), k, rank=rank, dtype=dtype)
    x, y = random(tokens, k, seed=seed, dtype=dtype), random(tokens, 2 * size, seed=1, dtype=dtype)
    slots = slots_of(tokens, seed)

    def run() -> Tensor:
        groups = lora_groups.group_rows(slots[:num_grouped]) if num_grouped else None
        shrunk = launchers.shrink_lora(x, slots, lora, num_single=num_single, groups=groups)
        poison((tokens, size), dtype=dtype)
        return launchers.expand_lora_gated(y.clone(), shrunk, slots, lora, groups=groups, gelu=gelu)

    gate = kernels.gelu_tanh_mul if gelu else kernels.silu_mul
    found, expected = assert_repeatable(run), gate(add_reference(y.clone(), x, slots, lora))
    shrunk = kernels.shrink_lora.reference(x, slots, lora)
    by_reference = kernels.expand_lora_gated.reference(y.clone(), shrunk, slots, lora, gelu=gelu)
    assert torch.equal(by_reference, expected)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * k)
    alone = launchers.silu_mul(y) if not gelu else launchers.gelu_tanh_mul(y)
    assert torch.equal(found[slots == -1], alone[slots == -1]), "rows without an adapter have the gate alone"


def in_groups(y: Tensor, x: Tensor, slots: Tensor, lora: LoRAWeights) -> Tensor:
    return add(y, x, slots, lora, groups=lora_groups.group_rows(slots))


@pytest.mark.parametrize("added", [add_reference, add, in_groups])
def test_a_row_is_what_it_is_whatever_stands_beside_it(
    added: Callable[[Tensor, Tensor, Tensor, LoRAWeights], Tensor],
) -> None:
    """Also where a neighbour's adapter is broken."""
    lora = weights(5, (48,), 600, dtype=torch.float32)
    lora.a[3].fill_(torch.nan)
    x, y = random(9, 600), random(9, 48, seed=1)
    slots = torch.full((9,), -1, dtype=torch.int32, device=DEVICE)
    slots[4] = 1
    alone = added(y.clone(), x, slots, lora)
    slots[:4], slots[6:8] = 3, 0
    beside = added(y.clone(), x, slots, lora)
    assert torch.equal(beside[[4, 5, 8]], alone[[4, 5, 8]])
    assert beside[0].isnan().all()


@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 1), (3, 0), (16, 1), (40, 1), (70, 3), (130, 99)])
def test_groups_have_all_rows_of_their_adapter_in_order(num_rows: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    slots = torch.randint(-1, num_slots, (num_rows,), generator=generator).to(torch.int32)
    poison((num_rows * (1 + GROUP),), dtype=torch.int32)
    expected, found = group_rows.reference(slots), lora_groups.group_rows(slots.to(DEVICE))
    assert torch.equal(found.slots.cpu(), expected.slots)
    count = int((expected.slots >= 0).sum())
    assert torch.equal(found.rows[:count].cpu(), expected.rows[:count])
    rows = [row for group in expected.rows[:count].tolist() for row in group if row >= 0]
    assert sorted(rows) == (slots >= 0).nonzero().flatten().tolist()
    assert all(len(set(slots[group[group >= 0]].tolist())) == 1 for group in expected.rows[:count])
    assert count <= num_slots + num_rows // GROUP


def test_few_rows_go_one_by_one_many_to_groups_and_prompts_to_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter of a tile costs a program some memory latencies: a tile of 64 rows may have 64 of them."""
    lora, taken = weights(3, (24,), 40, dtype=torch.float32), []
    for module in (launchers, lora_rows, lora_groups):
        monkeypatch.setattr(
            module, "launch", lambda kernel, grid, tensors, numbers, **_: taken.append((kernel.__name__, *numbers))
        )
    rows, slots = random(300, 40), slots_of(300, 1)
    for tokens, num_single in ((60, 0), (300, 0), (300, 64)):
        add(rows[:tokens, :24], rows[:tokens], slots[:tokens], lora, num_single)
    for tokens, num_grouped in ((300, 65), (300, 300), (60, 60), (0, 0)):
        groups = RowGroups(slots[:num_grouped], slots.new_empty(num_grouped, GROUP))
        add(rows[:tokens, :24], rows[:tokens], slots[:tokens], lora, 9, groups)
    few = [("row", 60), ("", 300), ("row", 64), ("", 236)]
    expected = [*few, ("group", 65), ("", 235), ("group", 300), ("group", 60)]
    kinds = [(name.removesuffix("_kernel").partition("_"), count) for name, count in taken]
    assert [(kind, count) for (step, _, kind), count in kinds if step == "shrink"] == expected
    assert [(kind, count) for (step, _, kind), count in kinds if step == "expand"] == expected


def test_a_row_of_a_high_rank_does_not_depend_on_how_many_there_are() -> None:
    lora = weights(3, (24,), 1100, rank=4 * MAX_RANK, dtype=torch.float32)
    x, y, slots = random(70, 1100), random(70, 24, seed=1), slots_of(70, 2)
    few, many = (in_groups(y[:rows].clone(), x[:rows], slots[:rows], lora) for rows in (3, 70))
    assert torch.equal(few, many[:3])


def test_compiled(compile_kernels: offline.Compile) -> None:
    found = compile_kernels("compile_lora")
    assert {name: case.spilled_bytes for name, case in found.items()} == dict.fromkeys(found, 0)
    products = [case for name, case in found.items() if not re.search("a row|group (starts|rows)", name)]
    assert all(case.wgmma or case.mma for case in products), "tensor cores multiply"
    assert all(case.shared_bytes <= offline.MAX_SHARED_BYTES for case in found.values())
