"""Draws from the lists of several ranks are those from whole rows, by the reference and by interpreted and compiled
kernels."""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.kernels import sampling, shortlist
from asyncllm.kernels.shortlist import EMPTY, LENGTH, TokenRange
from asyncllm.kernels.triton import shortlist as launchers
from tests.kernels import offline
from tests.kernels.device import fresh_seed, interpreted
from tests.kernels.test_sampling_triton import HARD_SETTINGS, hard_logits, outputs, table

SETTINGS = [
    *(entry for entry in HARD_SETTINGS if entry[1] in range(1, LENGTH + 1) or entry[1:3] == (0, 1.0)),
    (1.0, 10**9, 1.0, 0.0),
    (1.0, LENGTH, 0.97, 0.0),
    (3.0, LENGTH, 1.0, 0.02),
    (0.0, 10**9, 0.5, 0.0),
]
"""Those for which lists are enough."""


def ranges(vocab_size: int, ranks: int) -> list[TokenRange]:
    """As even as they may be; the last ones may have no token."""
    each = -(-vocab_size // (8 * ranks)) * 8
    return [TokenRange(rank * each, max(0, min(each, vocab_size - rank * each)), vocab_size) for rank in range(ranks)]


def drawn(
    ops: ModuleType, logits: Tensor, ranks: int, settings: Tensor, slots: Tensor, positions: Tensor
) -> tuple[list[int], list[int], Tensor]:
    """Tokens, flags and lists. What a rank has beyond the vocabulary is poison."""
    parts = ranges(logits.shape[1], ranks)
    own = logits.new_full((ranks, len(logits), parts[0].number + 8), torch.nan)
    for part, mine in zip(parts, own, strict=True):
        mine[:, : part.number] = logits[:, part.first : part.first + part.number]
    found = [ops.row_maxima(mine, part) for part, mine in zip(parts, own, strict=True)]
    maxima = torch.stack([rows for rows, _ in found]).amax(0)
    lists = torch.stack(
        [
            ops.shortlist(mine, part, known, maxima, settings, slots, positions)
            for part, mine, (_, known) in zip(parts, own, found, strict=True)
        ]
    )
    tokens, flags = outputs(len(logits), logits.device)
    ops.draw_listed(lists, logits.shape[1], maxima, settings, slots, positions, tokens, flags)
    return tokens.tolist(), flags.tolist(), lists


def rows(
    count: int, vocab_size: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, settings, slots and positions. Some rows can not be drawn for, and one has no slot."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = hard_logits(count, vocab_size, generator).to(dtype)
    logits[1, 3], logits[2] = torch.nan, -torch.inf
    logits[5, vocab_size - 1] = torch.inf
    listable = [entry for entry in SETTINGS if entry[1] < vocab_size or entry[2] == 1 or entry[0] == 0]
    settings = table((listable * count)[:count], random.Random(seed)).to(device)
    slots = torch.randperm(count, generator=generator, device=device).to(torch.int32)
    slots[7] = -1
    return logits, settings, slots, torch.randint(0, 2**40, (count,), generator=generator, device=device)


@interpreted
@pytest.mark.parametrize(("vocab_size", "ranks"), [(1031, 2), (611, 3), (300, 4), (20, 4)])
def test_lists_are_enough(vocab_size: int, ranks: int) -> None:
    for seed in range(4):
        given = rows(3 * len(SETTINGS), vocab_size, (torch.float32, torch.bfloat16)[seed % 2], seed)
        tokens, flags = outputs(len(given[0]))
        sampling.sample(*given, tokens, flags)
        assert drawn(shortlist, given[0], ranks, *given[1:])[:2] == (tokens.tolist(), flags.tolist())
    assert {sampling.NOT_FINITE, sampling.NOTHING_LEFT} <= set(flags.tolist())


@interpreted
@pytest.mark.parametrize(("vocab_size", "ranks", "dtype"), [(1031, 2, torch.bfloat16), (20, 4, torch.float32)])
def test_interpreted_kernels_list_and_draw_the_same(vocab_size: int, ranks: int, dtype: torch.dtype) -> None:
    logits, settings, slots, positions = rows(len(SETTINGS) + 2, vocab_size, dtype, fresh_seed())
    expected = drawn(shortlist, logits, ranks, settings, slots, positions)
    with np.errstate(over="ignore"):  # as in test_sampling_triton.py
        found = drawn(launchers, logits, ranks, settings, slots, positions)
    assert found[:2] == expected[:2]
    usable = (slots >= 0) & (torch.tensor(expected[1]) == 0)
    chosen = settings[slots.clamp_min(0)]
    listed = usable & ((chosen[:, 4] == 0) | ((chosen[:, 1] > 0) & (chosen[:, 1] < vocab_size)))
    # What is impossible may be missing.
    possible = (
        lists[:, listed].masked_fill(sampling.unpack(lists[:, listed])[0].isneginf(), EMPTY).sort(-1).values
        for lists in (expected[2], found[2])
    )
    assert torch.equal(*possible)


def test_no_rows_is_no_work() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    settings = torch.zeros(1, sampling.NUM_SETTINGS, dtype=torch.int64)
    for ops in (shortlist, launchers):
        assert drawn(ops, torch.zeros(0, 9), 2, settings, nothing, nothing)[:2] == ([], [])


def test_kernels_compile_with_next_to_no_spills(compile_kernels: offline.Compile) -> None:
    for case in compile_kernels("compile_shortlist").values():
        assert case.spilled_bytes <= 24, case
        assert case.shared_bytes <= 32_768, case


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "ranks"), [(128_256, 2), (128_256, 4), (151_936, 8), (32_000, 3), (5003, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_draw_the_tokens_of_whole_rows(vocab_size: int, ranks: int, dtype: torch.dtype) -> None:
    given = rows(64, vocab_size, dtype, fresh_seed(), "cuda")
    tokens, flags = outputs(64, "cuda")
    sampling.sample(*given, tokens, flags)
    assert drawn(shortlist, given[0], ranks, *given[1:])[:2] == (tokens.tolist(), flags.tolist())
