"""Computes a step in parts that need less memory: its decode rows, and two halves of its prompt chunks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.step.slots import StepArrays
from asyncllm.agent.step.tables import StepTensors
from asyncllm.layers.step_inputs import KV_LENS, StepInputs
from asyncllm.models.decoder import DecoderLM

__all__ = ["compute_in_parts", "decode_rows", "prefill_halves"]


def compute_in_parts(model: DecoderLM, step: StepTensors, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return the hidden states of a step's tokens [T, hidden], and whether memory sufficed for the halves of the
    prompts; if not, the prompts' hidden states are nan."""
    inputs, num_decode = step.inputs, step.arrays.num_decode
    hidden = torch.full(
        (step.arrays.num_tokens, model.config.hidden_size), torch.nan, dtype=dtype, device=inputs.positions.device
    )
    if num_decode:
        hidden[:num_decode] = model(decode_rows(inputs, num_decode))
    if inputs.joint:
        # Halving tokens that are computed together does not help.
        return hidden, False
    try:
        for tokens, half in prefill_halves(step.arrays, inputs):
            hidden[tokens] = model(half)
    except torch.OutOfMemoryError:
        hidden[num_decode:] = torch.nan
        return hidden, False
    return hidden, True


def decode_rows(inputs: StepInputs, count: int) -> StepInputs:
    """Return the inputs of a step's decode rows only, its first `count` rows."""
    first = slice(count)
    return inputs.select(first, first, num_decode=count, q_offsets=inputs.q_offsets[: count + 1], max_q_len=1)


def prefill_halves(arrays: StepArrays, inputs: StepInputs) -> Iterator[tuple[Tensor, StepInputs]]:
    """Yield the first half of every prompt chunk of a step, then the second: (indices [t] int64 among the step's
    tokens, their inputs). Waits for the device; only failed steps are split."""
    assert arrays.offsets is not None
    first_row = arrays.num_decode
    starts, ends = arrays.offsets[first_row:-1], arrays.offsets[first_row + 1 :]
    middles = (starts + ends + 1) // 2
    kv_lens = arrays.columns[KV_LENS][first_row:]
    for begin, end, lens in ((starts, middles, kv_lens - (ends - middles)), (middles, ends, kv_lens)):
        rows = np.flatnonzero(end > begin)
        if not len(rows):
            continue
        lengths = (end - begin)[rows]
        indices = np.concatenate([np.arange(begin[row], end[row]) for row in rows])
        device = inputs.input_ids.device
        tokens = torch.from_numpy(indices).to(device)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        yield (
            tokens,
            inputs.select(
                tokens,
                torch.from_numpy(rows + inputs.num_decode).to(device),
                num_decode=0,
                q_offsets=torch.from_numpy(offsets).to(device),
                max_q_len=int(lengths.max()),
                kv_lens=torch.from_numpy(lens[rows].astype(np.int32)).to(device),
            ),
        )
