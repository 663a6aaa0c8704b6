"""The sampling kernels draw the very tokens of the reference."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.kernels import sampling
from asyncllm.kernels.triton import sampling as launchers
from tests.kernels import offline
from tests.kernels.device import interpreted

HARD_SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (0.8, 1, 0.5, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.2),
    (1.3, 5, 1.0, 0.0),
    (1.0, 40, 0.9, 0.0),
    (2.0, 0, 0.95, 0.0),
    (1.5, 0, 0.999, 0.01),
    (1e-30, 0, 1.0, 0.0),
    (1.0, 10**9, 0.3, 0.5),
    (1e-45, 3, 0.9, 0.0),
    (1e30, 200, 0.7, 0.0),
    (1.0, 0, 0.0, 1.0),
    (1.0, 0, 1e-9, 0.0),
    (50.0, 0, 0.9, 0.0),
    (1e30, 0, 1 - 2**-53, 0.0),
]
"""Temperature, top-k, top-p, min-p: each way through the kernels, and the ends of each range."""


def table(settings: list[tuple[float, int, float, float]], dice: random.Random) -> Tensor:
    return torch.tensor([sampling.pack_settings(*entry, seed=dice.getrandbits(64)) for entry in settings])


def outputs(rows: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and flags that nobody has written yet."""
    return torch.full((rows,), -7, device=device), torch.full((rows,), -7, dtype=torch.int32, device=device)


def expected(logits: Tensor, settings: Tensor, slots: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    tokens, flags = outputs(len(logits))
    sampling.sample.reference(logits, settings, slots, positions, tokens, flags)  # type: ignore[attr-defined]
    return tokens, flags


def launched(logits: Tensor, settings: Tensor, slots: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    tokens, flags = outputs(len(logits), logits.device)
    # A tiny temperature makes differences infinite, of which the interpreter warns.
    with np.errstate(over="ignore"):
        launchers.sample(logits, settings, slots, positions, tokens, flags)
    return tokens.cpu(), flags.cpu()


def hard_logits(rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Smooth rows, rows full of equal values, constant ones, and some with few possible tokens."""
    logits = torch.randn(rows, vocab_size, generator=generator, device=generator.device)
    logits[::2] = (logits[::2] * 3).round()
    logits[1::5, ::3] = -torch.inf
    logits[3::7] = 2.5
    logits[4::9, 1:] = -torch.inf
    return logits


@interpreted
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "rows"), [(300, torch.float32, 16), (1031, torch.bfloat16, 16), (5003, torch.float16, 5)]
)
def test_interpreted_kernels_draw_the_tokens_of_the_reference(vocab_size: int, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = hard_logits(rows, vocab_size, generator).to(dtype)
    settings = table(HARD_SETTINGS, random.Random(vocab_size))
    slots = torch.randperm(len(HARD_SETTINGS), generator=generator)[:rows].to(torch.int32)
    positions = torch.randint(0, 2**40, (rows,), generator=generator)
    tokens, flags = launched(logits, settings, slots, positions)
    reference = expected(logits, settings, slots, positions)
    assert tokens.tolist() == reference[0].tolist()
    assert flags.tolist() == reference[1].tolist() == [0] * rows


@interpreted
def test_interpreted_kernels_tell_failed_rows_and_leave_out_rows_without_a_slot() -> None:
    logits = torch.randn(8, 132, generator=torch.Generator().manual_seed(0))[:, :130]
    logits[0, 7], logits[1, 9], logits[2], logits[3, 8] = torch.nan, torch.inf, -torch.inf, -torch.nan
    logits[4, :129] = -torch.inf
    settings = table(
        [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.0)] * 2, random.Random(1)
    )
    slots = torch.tensor([0, 1, 2, 3, 1, 2, -1, 7])
    tokens, flags = launched(logits, settings, slots, torch.arange(8, dtype=torch.int32))
    reference = expected(logits, settings, slots, torch.arange(8, dtype=torch.int32))
    assert flags.tolist() == reference[1].tolist()
    assert flags.tolist() == [*[sampling.NOT_FINITE] * 2, sampling.NOTHING_LEFT, sampling.NOT_FINITE, 0, 0, 0, 0]
    assert tokens.tolist() == reference[0].tolist()
    assert tokens[4] == 129


@interpreted
def test_interpreted_rows_may_own_their_settings() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    settings = table([(1.0, 0, 1.0, 0.0), (1.5, 20, 0.9, 0.0), (0.9, 0, 0.8, 0.02)], random.Random(3))
    positions = torch.tensor([5, 6, 7])
    assert (
        launched(logits, settings, None, positions)[0].tolist()
        == expected(logits, settings, None, positions)[0].tolist()
    )


def test_no_rows_is_no_work() -> None:
    tokens, flags = launched(
        torch.zeros(0, 8), torch.zeros(1, sampling.NUM_SETTINGS, dtype=torch.int64), None, torch.zeros(0)
    )
    assert tokens.shape == flags.shape == (0,)


def test_kernels_compile_with_next_to_no_spills(compile_kernels: offline.Compile) -> None:
    for case in compile_kernels("compile_sampling").values():
        assert case.spilled_bytes <= 24, case  # Triton 3.7 spills none
        assert case.shared_bytes <= 32_768, case


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 32_000, 5003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_compiled_kernels_draw_the_tokens_of_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows = 64
    logits = hard_logits(rows, vocab_size, generator).to(dtype)
    logits[5, 17], logits[6] = torch.nan, -torch.inf
    settings = table(HARD_SETTINGS * 4, random.Random(seed)).cuda()
    slots = torch.randperm(rows, generator=generator, device="cuda").to(torch.int32)
    slots[7] = -1
    positions = torch.randint(0, 2**40, (rows,), generator=generator, device="cuda")
    first = launched(logits, settings, slots, positions)
    reference = expected(logits.cpu(), settings.cpu(), slots.cpu(), positions.cpu())
    assert first[1].tolist() == reference[1].tolist(), f"seed {seed}"
    assert first[0].tolist() == reference[0].tolist(), f"seed {seed}"
    second = launched(logits, settings, slots, positions)
    assert torch.equal(first[0], second[0]), f"seed {seed}"
    alone = [
        launched(logits[row : row + 1], settings, slots[row : row + 1], positions[row : row + 1]) for row in range(9)
    ]
    assert [int(tokens) for tokens, _ in alone] == first[0].tolist()[:9], f"seed {seed}"
    on_gpu = outputs(rows, "cuda")
    sampling.sample.reference(logits, settings, slots, positions, *on_gpu)  # type: ignore[attr-defined]
    assert on_gpu[0].tolist() == first[0].tolist(), f"seed {seed}"


@pytest.mark.gpu
def test_a_captured_draw_follows_what_its_inputs_become() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.empty(16, 32_000, dtype=torch.bfloat16, device="cuda")
    settings = table(HARD_SETTINGS, random.Random(seed)).cuda()
    slots = torch.arange(16, dtype=torch.int32, device="cuda")
    positions = torch.zeros(16, dtype=torch.int64, device="cuda")
    tokens, flags = outputs(16, "cuda")
    logits.normal_(generator=generator)
    launchers.sample(logits, settings, slots, positions, tokens, flags)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launchers.sample(logits, settings, slots, positions, tokens, flags)
    for step in range(5):
        logits.normal_(generator=generator)
        positions.fill_(step)
        tokens.fill_(-7)
        graph.replay()
        reference = expected(logits.cpu(), settings.cpu(), slots.cpu(), positions.cpu())
        assert tokens.tolist() == reference[0].tolist(), f"seed {seed}"
