"""SlotArrays: positions, block tables and places of tokens, from batches alone."""

from __future__ import annotations

import numpy as np

from asyncllm.agent.slots import SlotArrays
from asyncllm.batch import Batch, PrefillRow, SamplingParams, SlotStart

BLOCK_SIZE = 4


def batch_of(decode: list[int], *prefill: PrefillRow) -> Batch:
    return Batch(step=0, starts=[], new_blocks=[], copies=[], decode=decode, prefill=list(prefill))


def slots_of(**prompts: int) -> SlotArrays:
    """Slots named s0, s1, ... with prompts of so many tokens; slot s has the blocks 10 * s + 1 and so on."""
    slots = SlotArrays(4, 30, BLOCK_SIZE)
    for name, num_prompt in prompts.items():
        slot = int(name[1:])
        slots.start(
            SlotStart(slot=slot, params=SamplingParams(), num_prompt=num_prompt, num_tokens=num_prompt, token_ids=[])
        )
        slots.write_blocks(slot, 0, [10 * slot + index for index in range(1, 4)])
    return slots


def test_every_position_of_a_session_has_a_block() -> None:
    assert slots_of().max_blocks == 8


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
    assert arrays.known.tolist() == [6, 7, 8, 9, 8]
    assert arrays.positions.tolist() == [5, 0, 1, 4, 5, 6]
    assert arrays.slot_mapping.tolist() == [2 * 4 + 1, 31 * 4, 31 * 4 + 1, 22 * 4, 22 * 4 + 1, 22 * 4 + 2]
    assert arrays.kv_lens.tolist() == [6, 2, 7]
    assert arrays.prompt_lens.tolist() == [5, 2, 2, 9, 9, 9]
    assert (arrays.num_decode, arrays.max_q_len) == (1, 3)
    rows = arrays.rows
    assert rows.indices is not None
    assert (rows.slots.tolist(), rows.positions.tolist(), rows.indices.tolist()) == ([0, 3], [6, 2], [0, 2])
    assert rows.prefill_starts == [1, 3]
    assert [slots.blocks(slot).tolist() for slot in range(4)] == [[1, 2], [], [21, 22], [31]]


def test_decode_steps_give_the_same_both_ways() -> None:
    one, other = slots_of(s0=5, s1=8), slots_of(s0=5, s1=8)
    for slots in (one, other):
        for slot, length in ((0, 5), (1, 8)):
            slots.advance(batch_of([], PrefillRow(slot=slot, tokens=[1] * length, position=0, sample=True)))
    for order in ([1, 0], [0], [0, 1]):
        arrays = one.advance(batch_of(order))
        positions, prompt_lens = other.advance_decode(np.array(order))
        assert arrays.positions.tolist() == positions.tolist() == (arrays.kv_lens - 1).tolist()
        assert arrays.prompt_lens.tolist() == prompt_lens.tolist()
        assert (arrays.offsets, arrays.rows.indices, arrays.max_q_len) == (None, None, 1)
        assert arrays.rows.positions.tolist() == (positions + 1).tolist()
    assert arrays.positions.tolist() == [7, 9]


def test_a_new_owner_begins_at_the_first_position() -> None:
    slots = slots_of(s1=8)
    slots.advance(batch_of([], PrefillRow(slot=1, tokens=[1] * 8, position=0, sample=True)))
    slots.start(SlotStart(slot=1, params=SamplingParams(), num_prompt=3, num_tokens=3, token_ids=[]))
    assert slots.blocks(1).tolist() == []
    positions, prompt_lens = slots.advance_decode(np.array([1]))
    assert (positions.tolist(), prompt_lens.tolist()) == ([0], [3])


def test_a_short_row_repeats_its_first_block() -> None:
    slots = slots_of(s0=1, s1=9)
    tables = slots.block_tables(np.array([1, 0]), np.array([9, 1]))
    assert tables.tolist() == [[11, 12, 13], [1, 1, 1]]
    assert slots.block_tables(np.array([1]), np.array([8])).tolist() == [[11, 12]]
