"""A step in parts that need less memory: its decode rows, and its prompt chunks in two halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.slots import StepArrays
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["decode_rows", "prefill_halves"]


def decode_rows(inputs: StepInputs, count: int) -> StepInputs:
    """The decode rows of a step alone, the first `count` rows."""
    return dataclasses.replace(
        inputs,
        num_decode=count,
        input_ids=inputs.input_ids[:count],
        positions=inputs.positions[:count],
        slot_mapping=inputs.slot_mapping[:count],
        q_offsets=inputs.q_offsets[: count + 1],
        kv_lens=inputs.kv_lens[:count],
        block_tables=inputs.block_tables[:count],
        max_q_len=1,
        rope_lens=None if inputs.rope_lens is None else inputs.rope_lens[:count],
    )


def prefill_halves(arrays: StepArrays, inputs: StepInputs) -> Iterator[tuple[Tensor, StepInputs]]:
    """The first half of every prompt chunk of a step, then the second: (places [t] int64 among the step's tokens,
    their inputs). Waits for the device; it is for steps that have failed already."""
    assert arrays.offsets is not None
    first_row = arrays.num_decode
    starts, ends = arrays.offsets[first_row:-1], arrays.offsets[first_row + 1 :]
    middles = (starts + ends + 1) // 2
    kv_lens = arrays.kv_lens[first_row:]
    for begin, end, lens in ((starts, middles, kv_lens - (ends - middles)), (middles, ends, kv_lens)):
        rows = np.flatnonzero(end > begin)
        if not len(rows):
            continue
        lengths = (end - begin)[rows]
        places = np.concatenate([np.arange(begin[row], end[row]) for row in rows])
        device = inputs.input_ids.device
        tokens = torch.from_numpy(places).to(device)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        yield (
            tokens,
            dataclasses.replace(
                inputs,
                input_ids=inputs.input_ids[tokens],
                positions=inputs.positions[tokens],
                slot_mapping=inputs.slot_mapping[tokens],
                num_decode=0,
                q_offsets=torch.from_numpy(offsets).to(device),
                kv_lens=torch.from_numpy(lens[rows].astype(np.int32)).to(device),
                block_tables=inputs.block_tables[torch.from_numpy(rows + inputs.num_decode).to(device)],
                max_q_len=int(lengths.max()),
                rope_lens=None if inputs.rope_lens is None else inputs.rope_lens[tokens],
            ),
        )
