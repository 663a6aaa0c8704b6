"""SlotArrays: positions, block tables and places of tokens, from batches alone."""

from __future__ import annotations

from asyncllm.agent.step.slots import SlotArrays
from asyncllm.layers.rotary import ROPE_LENS
from asyncllm.layers.step_inputs import INPUT_IDS, KV_LENS, PLACES, POSITIONS
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart

BLOCK_SIZE = 4


def batch_of(decode: list[int], *prefill: PrefillRow) -> Batch:
    return Batch(step=0, starts=[], new_blocks=[], copies=[], decode=decode, prefill=list(prefill))


def slots_of(**prompts: int) -> SlotArrays:
    """Slots named s0, s1, ... with prompts of so many tokens; slot s has the blocks 10 * s + 1 and so on."""
    slots = SlotArrays(4, 30, BLOCK_SIZE, [ROPE_LENS])
    for name, num_prompt in prompts.items():
        slot = int(name[1:])
        slots.start(
            SlotStart(slot=slot, params=SamplingParams(), num_prompt=num_prompt, num_tokens=num_prompt, token_ids=[])
        )
        slots.write_blocks(slot, 0, 0, [10 * slot + index for index in range(1, 4)])
    return slots


def test_every_position_of_a_session_has_a_block() -> None:
    assert slots_of().max_blocks == 8


def test_the_longest_context_of_the_next_step() -> None:
    slots = slots_of(s0=5, s2=9)
    long = PrefillRow(slot=2, tokens=[1, 2], position=4, sample=False)
    slots.advance(batch_of([], PrefillRow(slot=0, tokens=[1] * 5, position=0, sample=True)))
    steps = (batch_of([0]), batch_of([], long), batch_of([0], long), batch_of([0], long), batch_of([]))
    longest = []
    for batch in steps:
        longest.append(slots.longest_context(batch))
        if longest[-1]:
            assert longest[-1] == slots.advance(batch).columns[KV_LENS].max()
    assert longest == [6, 6, 7, 8, 0]


def test_a_mixed_step() -> None:
    slots = slots_of(s0=5, s2=9, s3=2)
    slots.advance(batch_of([], PrefillRow(slot=0, tokens=[1] * 5, position=0, sample=True)))
    arrays = slots.advance(
        batch_of(
            [0],
            PrefillRow(slot=3, tokens=[6, 7], position=0, sample=True),
            PrefillRow(slot=2, tokens=[8, 9, 8], position=4, sample=False),
        )
    )
    assert arrays.row_slots.tolist() == [0, 3, 2]
    assert arrays.offsets is not None
    assert arrays.offsets.tolist() == [0, 1, 3, 6]
    assert arrays.columns[INPUT_IDS].tolist() == [~0, 6, 7, 8, 9, 8]
    assert arrays.columns[POSITIONS].tolist() == [5, 0, 1, 4, 5, 6]
    assert arrays.columns[PLACES].tolist() == [2 * 4 + 1, 31 * 4, 31 * 4 + 1, 22 * 4, 22 * 4 + 1, 22 * 4 + 2]
    assert arrays.columns[KV_LENS].tolist() == [6, 2, 7]
    assert arrays.columns[ROPE_LENS].tolist() == [5, 2, 2, 9, 9, 9]
    assert (arrays.num_decode, arrays.max_q_len) == (1, 3)
    rows = arrays.rows
    assert rows.indices is not None
    assert (rows.slots.tolist(), rows.positions.tolist(), rows.indices.tolist()) == ([0, 3], [6, 2], [0, 2])
    assert rows.numbers.tolist() == [0, 1]
    assert rows.prefill_starts == [1, 3]


def test_a_step_of_decode_rows() -> None:
    slots = slots_of(s0=5, s1=8)
    for slot, length in ((0, 5), (1, 8)):
        slots.advance(batch_of([], PrefillRow(slot=slot, tokens=[1] * length, position=0, sample=True)))
    for order, positions in (([1, 0], [8, 5]), ([0], [6]), ([0, 1], [7, 9])):
        arrays = slots.advance(batch_of(order))
        assert arrays.columns[INPUT_IDS].tolist() == [~slot for slot in order]
        assert arrays.columns[POSITIONS].tolist() == positions
        assert arrays.columns[KV_LENS].tolist() == [position + 1 for position in positions]
        assert arrays.columns[ROPE_LENS].tolist() == [(5, 8)[slot] for slot in order]
        assert (arrays.offsets, arrays.rows.indices, arrays.max_q_len) == (None, None, 1)
        assert arrays.rows.positions.tolist() == [position + 1 for position in positions]


def test_a_new_owner_begins_at_the_first_position() -> None:
    slots = slots_of(s1=8)
    slots.advance(batch_of([], PrefillRow(slot=1, tokens=[1] * 8, position=0, sample=True)))
    slots.start(SlotStart(slot=1, params=SamplingParams(), num_prompt=3, num_tokens=3, token_ids=[]))
    arrays = slots.advance(batch_of([1]))
    assert (arrays.columns[POSITIONS].tolist(), arrays.columns[ROPE_LENS].tolist()) == ([0], [3])
