"""Preparing a decode step from device state, and flags for what is not finite."""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels import DecodeInputs, prepare_decode, record_tokens, segments_finite
from asyncllm.kernels.triton import step as launchers
from tests.kernels import offline
from tests.kernels.device import DEVICE, fresh_seed, random

PREPARE = pytest.mark.parametrize("prepare", [prepare_decode.reference, launchers.prepare_decode])
FINITE = pytest.mark.parametrize("finite", [segments_finite.reference, launchers.segments_finite])


@PREPARE
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_prepare_decode(prepare: object, position_dtype: torch.dtype) -> None:
    assert callable(prepare)
    tables = torch.tensor([[9, 8, 7, 6], [1, 2, 3, 0], [5, 4, 0, 0]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3, 77, 11, 4], dtype=position_dtype, device=DEVICE)
    last_tokens = torch.tensor([100, 2**40, 300], device=DEVICE)
    out = DecodeInputs.zeros(4, 4, DEVICE)
    out.block_tables.fill_(50)
    prepare(slots, positions, last_tokens, tables, 4, out)
    assert out.input_ids.tolist() == [300, 0, 100, 2**40]
    assert out.positions.tolist() == [3, 0, 11, 4]
    assert out.places.tolist() == [5 * 4 + 3, -1, 7 * 4 + 3, 2 * 4]
    assert out.kv_lens.tolist() == [4, 0, 12, 5]
    assert out.block_tables.tolist() == [[5, 4, 50, 50], [50] * 4, [9, 8, 7, 6], [1, 2, 3, 50]]
    assert [part.dtype for part in out] == [torch.int64, torch.int64, torch.int64, torch.int32, torch.int32]


@PREPARE
def test_prepare_decode_of_long_tables(prepare: object) -> None:
    """More entries than a program copies at a time."""
    assert callable(prepare)
    width = 2 * launchers.ENTRIES + 9
    tables = torch.arange(2 * width, dtype=torch.int32, device=DEVICE).view(2, width).flip(1)
    out = DecodeInputs.zeros(1, width, DEVICE)
    position = torch.tensor([16 * (width - 3) + 5], device=DEVICE)
    slot, tokens = torch.tensor([1], dtype=torch.int32, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    prepare(slot, position, tokens, tables, 16, out)
    assert torch.equal(out.block_tables[0, : width - 1], tables[1, : width - 1])
    assert out.block_tables[0, -1] == 0
    assert out.places.item() == int(tables[1, width - 3]) * 16 + 5


@FINITE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_segments_finite(finite: object, bad: float) -> None:
    assert callable(finite)
    offsets = torch.tensor([0, 3, 3, 4, 9, 9], dtype=torch.int32, device=DEVICE)
    for row, expected in enumerate([0, 0, 0, 2, 3, 3, 3, 3, 3, None, None]):
        hidden = random(11, 37)
        hidden[row, 5 + row] = bad
        flags = finite(hidden, offsets)
        assert flags.dtype == torch.int32
        assert flags.nonzero().flatten().tolist() == ([] if expected is None else [expected])


@FINITE
def test_large_values_are_finite(finite: object) -> None:
    assert callable(finite)
    hidden = torch.full((2, 8), 3e38, device=DEVICE).bfloat16()
    assert finite(hidden, torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)).tolist() == [0, 0]


@pytest.mark.parametrize("record", [record_tokens.reference, launchers.record_tokens])
@pytest.mark.parametrize("num_rows", [1, 5, launchers.ROWS + 3])
def test_record_tokens(record: object, num_rows: int) -> None:
    """Padding rows write no slot; tokens and flags of all rows go to the host."""
    assert callable(record)
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE).flip(0)
    slots[3::4] = -1
    tokens = 7 + torch.arange(num_rows, device=DEVICE)
    flags = torch.arange(num_rows, dtype=torch.int32, device=DEVICE) % 3
    last = torch.full((num_rows + 2,), -9, dtype=torch.int64, device=DEVICE)
    results = torch.full((2, num_rows), -9, dtype=torch.int32, device=DEVICE)
    record(tokens, flags, slots, last, results)
    known = {slot: token for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True) if slot >= 0}
    assert last.tolist() == [known.get(slot, -9) for slot in range(num_rows + 2)]
    assert results.tolist() == [tokens.tolist(), flags.tolist()]


def test_compiled(compile_kernels: offline.Compile) -> None:
    for name in ("prepare_decode", "segments_finite 4096"):
        assert compile_kernels("compile_pointwise")[name].spilled_bytes == 0


@pytest.mark.gpu
def test_prepare_decode_on_gpu_is_the_reference() -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    slots = torch.randperm(512, generator=generator)[:256].int()
    slots[::7] = -1
    positions = torch.randint(0, 8192, (256,), generator=generator)
    tables = torch.randint(0, 10**6, (512, 130), generator=generator, dtype=torch.int32)
    tokens = torch.randint(0, 128256, (512,), generator=generator)
    expected, out = DecodeInputs.zeros(256, 130, torch.device("cpu")), DecodeInputs.zeros(256, 130, DEVICE)
    prepare_decode(slots, positions, tokens, tables, 64, expected)
    prepare_decode(slots.to(DEVICE), positions.to(DEVICE), tokens.to(DEVICE), tables.to(DEVICE), 64, out)
    for expected_part, part in zip(expected, out, strict=True):
        assert torch.equal(expected_part, part.cpu())


@pytest.mark.gpu
def test_segments_finite_on_gpu() -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    hidden = torch.randn(3000, 4096, generator=generator).to(DEVICE, torch.bfloat16)
    offsets = torch.cat([torch.arange(200), torch.tensor([200, 700, 700, 2999])]).int().to(DEVICE)
    assert not segments_finite(hidden, offsets).any()
    hidden[[17, 650, 2999], [0, 4095, 9]] = torch.inf
    assert segments_finite(hidden, offsets).nonzero().flatten().tolist() == [17, 200]
