"""A step of complete prompts with caches of their own, for layers and models that run without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncllm.layers.axis_positions import AXIS_COLUMNS
from asyncllm.layers.cache_spec import CacheSpec
from asyncllm.layers.rotary import ROPE_LENS
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["empty_cache", "prompt_step"]


def prompt_step(
    input_ids: Tensor, lens: Sequence[int], caches: Sequence[object], *, block_size: int, device: torch.device
) -> StepInputs:
    """Return the step that computes prompts of `lens` tokens, each with the next ceil(length / block_size) blocks.

    input_ids: int64 [T], the prompts' tokens, concatenated. `caches`: one for each layer.
    """
    lengths = torch.tensor(lens)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    widths = -(-lengths // block_size)
    first_blocks = torch.cat([widths.new_zeros(1), widths.cumsum(0)])[:-1]
    positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(lengths)
    places = positions + first_blocks.repeat_interleave(lengths) * block_size
    tables = (first_blocks[:, None] + torch.arange(int(widths.max()))).clamp(max=int(widths.sum()) - 1)
    return StepInputs(
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        places=places.to(device),
        num_decode=0,
        q_offsets=ends.int().to(device),
        kv_lens=lengths.int().to(device),
        block_tables=tables.int().to(device),
        max_q_len=max(lens),
        caches=caches,
        prompts=[(length, length) for length in lens],
        # Text advances equally along all axes.
        more={
            ROPE_LENS: lengths.repeat_interleave(lengths).to(device),
            **dict.fromkeys(AXIS_COLUMNS, torch.zeros_like(positions).to(device)),
        },
    )


def empty_cache(
    spec: CacheSpec, lens: Sequence[int], *, block_size: int, dtype: torch.dtype, device: torch.device
) -> object:
    """Return an empty cache of one layer, with the blocks of the step that `prompt_step` returns for `lens`."""
    num_blocks = sum(-(-length // block_size) for length in lens)
    tensors = [
        torch.zeros(part.planes, num_blocks, *part.shape, dtype=part.dtype, device=device)
        for part in spec.parts(block_size, dtype)
    ]
    return spec.cache(tensors, block_size)
