"""Steps for layers that are tested alone."""

from __future__ import annotations

import torch

from asyncllm.layers.rotary import ROPE_LENS
from asyncllm.layers.step_inputs import StepInputs


def step_at(positions: list[int], rope_lens: list[int] | None = None) -> StepInputs:
    """One row of tokens at these positions; nothing else of it is read."""
    tokens, row = torch.tensor(positions), torch.zeros(1, dtype=torch.int32)
    return StepInputs(
        input_ids=tokens,
        positions=tokens,
        places=tokens,
        num_decode=0,
        q_offsets=torch.tensor([0, len(positions)], dtype=torch.int32),
        kv_lens=row,
        block_tables=row[None],
        max_q_len=len(positions),
        caches=(),
        more={} if rope_lens is None else {ROPE_LENS: torch.tensor(rope_lens)},
    )
