"""A step in the layout of a captured one."""

from __future__ import annotations

import pytest

from asyncllm.agent.step.graph_sizes import MixedSize, empty_step, mixed_sizes, padded
from asyncllm.agent.step.slots import SlotArrays, StepArrays
from asyncllm.layers.rotary import ROPE_LENS
from asyncllm.layers.step_inputs import INPUT_IDS, KV_LENS, PLACES, POSITIONS
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart


def step(num_decode: int, prompts: list[int]) -> StepArrays:
    """Decode rows at position 10 in the first slots, then prompts of so many tokens in the next ones."""
    slots = SlotArrays(num_decode + len(prompts), max_position=64, block_size=4, columns=[ROPE_LENS])
    for slot in range(num_decode + len(prompts)):
        tokens = 10 if slot < num_decode else prompts[slot - num_decode]
        slots.start(SlotStart(slot=slot, params=SamplingParams(), num_prompt=tokens, num_tokens=tokens, token_ids=[]))
        slots.write_blocks(slot, 0, 0, [100 * slot + block for block in range(16)])
    rows = [
        PrefillRow(slot=num_decode + row, tokens=list(range(7, 7 + count)), position=0, sample=True)
        for row, count in enumerate(prompts)
    ]
    decode = list(range(num_decode))
    for _ in range(10):
        if decode:
            slots.advance(Batch(step=0, starts=[], new_blocks=[], copies=[], decode=decode, prefill=[]))
    return slots.advance(Batch(step=0, starts=[], new_blocks=[], copies=[], decode=decode, prefill=rows))


def test_a_step_in_a_larger_size() -> None:
    arrays = step(2, [3, 4])
    laid_out = padded(arrays, MixedSize(tokens=16, decode_rows=4, prompts=5))
    assert laid_out.row_slots.tolist() == [0, 1, 0, 0, 2, 3, 0, 0, 0]
    assert laid_out.offsets is not None
    assert laid_out.offsets.tolist() == [0, 1, 2, 2, 2, 5, 9, 16, 16, 16]
    assert laid_out.columns[KV_LENS].tolist() == [11, 11, -1, -1, 3, 4, 0, 0, 0]
    assert laid_out.columns[INPUT_IDS].tolist() == [~0, ~1, 7, 8, 9, 7, 8, 9, 10, *[0] * 7]
    assert laid_out.columns[POSITIONS].tolist() == [10, 10, 0, 1, 2, 0, 1, 2, 3, *[0] * 7]
    assert laid_out.columns[PLACES].tolist()[:9] == arrays.columns[PLACES].tolist()
    assert laid_out.columns[PLACES].tolist()[9:] == [-1] * 7
    assert laid_out.columns[ROPE_LENS].tolist() == [10, 10, 3, 3, 3, 4, 4, 4, 4, *[1] * 7]
    assert (laid_out.num_decode, laid_out.max_q_len) == (4, 16)
    assert laid_out.rows is arrays.rows


def test_a_step_that_fills_its_size_but_for_the_row_of_padding() -> None:
    laid_out = padded(step(2, [3, 11]), MixedSize(tokens=16, decode_rows=2, prompts=3))
    assert laid_out.offsets is not None
    assert laid_out.offsets.tolist() == [0, 1, 2, 5, 16, 16]
    assert laid_out.columns[KV_LENS].tolist() == [11, 11, 3, 11, 0]


def test_padding_alone() -> None:
    laid_out = padded(empty_step(), MixedSize(tokens=4, decode_rows=2, prompts=2))
    assert laid_out.offsets is not None
    assert laid_out.offsets.tolist() == [0, 0, 0, 4, 4]
    assert laid_out.columns[KV_LENS].tolist() == [-1, -1, 0, 0]
    assert laid_out.columns[PLACES].tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("num_decode", "prompts", "held"),
    [
        (2, [3, 11], True),
        (2, [3, 12], False),
        (3, [1], False),
        (0, [16], True),
        (1, [1, 1, 1], False),
    ],
)
def test_what_a_size_holds(num_decode: int, prompts: list[int], held: bool) -> None:
    assert MixedSize(tokens=16, decode_rows=2, prompts=3).holds(step(num_decode, prompts)) is held


@pytest.mark.parametrize(
    ("max_batch_size", "max_tokens", "rows", "most"),
    [(256, 8192, [16, 256], 1024), (256, 1000, [16, 256], 1024), (4, 100, [4], 128), (4096, 32, [16, 512], 32)],
)
def test_sizes_grow(max_batch_size: int, max_tokens: int, rows: list[int], most: int) -> None:
    sizes = mixed_sizes(max_batch_size, max_tokens)
    assert sizes == sorted(sizes)
    assert sorted({size.decode_rows for size in sizes}) == rows
    assert sizes[0].tokens == 32
    assert sizes[-1] == (most, rows[-1], sizes[0].prompts)
    assert len(sizes) == len({size.tokens for size in sizes}) * len(rows)
