"""SlotTables: the tensors of a step against a token-by-token account."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from asyncllm.agent.inputs import SlotTables
from asyncllm.batch import Batch, PrefillRow, SamplingParams, SlotStart

BLOCK_SIZE = 4
NUM_SLOTS = 9


def batch_of(decode: list[int], prefill: list[PrefillRow]) -> Batch:
    return Batch(step=0, starts=[], new_blocks=[], copies=[], decode=decode, prefill=prefill)


def begin(tables: SlotTables, slot: int, num_prompt: int) -> None:
    tables.start(
        SlotStart(slot=slot, params=SamplingParams(), num_prompt=num_prompt, num_tokens=num_prompt, token_ids=[])
    )


@pytest.mark.parametrize("seed", range(8))
def test_step_inputs_equal_a_plain_account(seed: int) -> None:
    dice = random.Random(seed)
    tables = SlotTables(NUM_SLOTS, 64, BLOCK_SIZE, torch.device("cpu"), rope_lens=True)
    blocks = {slot: dice.sample(range(slot * 100, slot * 100 + 100), 16) for slot in range(NUM_SLOTS)}
    done = {slot: 0 for slot in range(NUM_SLOTS)}
    last: dict[int, int] = {}
    for slot in range(NUM_SLOTS):
        begin(tables, slot, 10 + slot)
        tables.write_blocks(slot, 0, blocks[slot][:5])
        tables.write_blocks(slot, 5, blocks[slot][5:])
    for _ in range(10):
        decode = [slot for slot in dice.sample(sorted(last), len(last)) if dice.random() < 0.7]
        rows = []
        for slot in dice.sample(range(NUM_SLOTS), 3):
            if slot not in last:
                tokens = dice.choices(range(1000), k=dice.randint(1, 7))
                rows.append(PrefillRow(slot=slot, tokens=tokens, position=done[slot], sample=dice.random() < 0.5))
        if not decode and not rows:
            continue
        inputs, step_rows = tables.build(batch_of(decode, rows))

        tokens, positions, places, offsets, lens, ropes = [], [], [], [0], [], []
        sampled = []
        for slot, fed in [(slot, [last[slot]]) for slot in decode] + [(row.slot, row.tokens) for row in rows]:
            for token in fed:
                tokens.append(token)
                positions.append(done[slot])
                places.append(blocks[slot][done[slot] // BLOCK_SIZE] * BLOCK_SIZE + done[slot] % BLOCK_SIZE)
                ropes.append(10 + slot)
                done[slot] += 1
            offsets.append(len(tokens))
            lens.append(done[slot])
            if slot in decode or next(row.sample for row in rows if row.slot == slot):
                sampled.append((slot, done[slot], len(tokens) - 1))
        assert inputs.input_ids.tolist() == tokens
        assert inputs.positions.tolist() == positions
        assert inputs.slot_mapping.tolist() == places
        assert inputs.q_offsets.tolist() == offsets
        assert inputs.kv_lens.tolist() == lens
        assert inputs.rope_lens is not None
        assert inputs.rope_lens.tolist() == ropes
        assert inputs.num_decode == len(decode)
        assert inputs.max_q_len == max([len(row.tokens) for row in rows], default=1)
        for row, slot in enumerate([*decode, *(row.slot for row in rows)]):
            owned = -(-lens[row] // BLOCK_SIZE)
            table = inputs.block_tables[row].tolist()
            assert table[:owned] == blocks[slot][:owned]
            assert set(table[owned:]) <= {blocks[slot][0]}
            assert tables.blocks(slot).tolist() == blocks[slot][:owned]
        assert step_rows.slots.tolist() == [slot for slot, _, _ in sampled]
        assert step_rows.positions.tolist() == [position for _, position, _ in sampled]
        indices = list(range(len(tokens))) if step_rows.indices is None else step_rows.indices.tolist()
        assert indices == [index for _, _, index in sampled]
        assert step_rows.prefill_starts == offsets[len(decode) : -1]
        drawn = torch.tensor([dice.randrange(1000) for _ in sampled], dtype=torch.int64)
        tables.set_last_tokens(step_rows.slots, drawn)
        last.update(zip(step_rows.slots.tolist(), drawn.tolist(), strict=True))


def test_types_and_shapes_are_those_of_step_inputs() -> None:
    tables = SlotTables(2, 64, BLOCK_SIZE, torch.device("cpu"))
    tables.set_last_tokens(np.array([1]), torch.tensor([5]))
    begin(tables, 1, 3)
    inputs, _ = tables.build(batch_of([1], [PrefillRow(slot=0, tokens=[1, 2], position=0, sample=True)]))
    for name in ("input_ids", "positions", "slot_mapping"):
        assert getattr(inputs, name).dtype == torch.int64
        assert getattr(inputs, name).shape == (3,)
    for name in ("q_offsets", "kv_lens", "block_tables"):
        assert getattr(inputs, name).dtype == torch.int32
    assert inputs.rope_lens is None


def test_a_new_owner_begins_at_its_own_position() -> None:
    tables = SlotTables(2, 64, BLOCK_SIZE, torch.device("cpu"))
    tables.build(batch_of([], [PrefillRow(slot=1, tokens=[1] * 20, position=0, sample=True)]))
    begin(tables, 1, 8)
    assert tables.blocks(1).tolist() == []
    # Four tokens came from the prefix cache.
    inputs, rows = tables.build(batch_of([], [PrefillRow(slot=1, tokens=[1] * 4, position=4, sample=True)]))
    assert inputs.positions.tolist() == [4, 5, 6, 7]
    assert rows.positions.tolist() == [8]
