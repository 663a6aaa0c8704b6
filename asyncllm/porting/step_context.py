"""A step for a layer, or a model, that runs without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.layers.cache_spec import CacheSpec, PagedKVSpec
from asyncllm.layers.prompt_step import empty_cache, prompt_step
from asyncllm.layers.rotary import RopeConfig, RotaryEmbedding
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.decoder import DecoderLM

__all__ = ["continuous_tensor", "make_step_context"]


def make_step_context(
    input_ids: Tensor,
    seq_length: Tensor | Sequence[int] | None = None,
    *,
    model: DecoderLM | None = None,
    num_key_value_heads: int = 32,
    head_size: int = 128,
    num_layers: int = 1,
    kv_cache_dtype: torch.dtype = torch.float16,
    block_size: int = 64,
    rope: RopeConfig | None = None,
) -> StepInputs:
    """Return the step of complete prompts, with empty caches and on the device of `input_ids`.

    input_ids [B, S] or [S] integers, padded on the right; `seq_length`: number of tokens of each row, by default S. A
    `model` determines the layers' caches and the tokens' rotations; without it there are `num_layers` caches of the
    given sizes, and a rotation if `rope` is given. Raises InvalidParameter for lengths that do not fit, and
    UnsupportedFeature for a model that reads images.
    """
    rows = input_ids if input_ids.ndim == 2 else input_ids[None]
    lens = _lengths(rows, seq_length)
    device, dtype = rows.device, kv_cache_dtype
    specs: Sequence[CacheSpec] = [PagedKVSpec(num_key_value_heads, head_size)] * num_layers
    if model is not None:
        if model.vision is not None:
            raise UnsupportedFeature("model: one that reads images cannot run on tokens only.", "model")
        specs = model.cache_specs
        parameter = next(each for each in model.parameters() if each.is_floating_point())
        device, dtype = parameter.device, parameter.dtype
    lengths = lens.tolist()
    step = prompt_step(
        continuous_tensor(rows, lens).long(),
        lengths,
        [empty_cache(spec, lengths, block_size=block_size, dtype=dtype, device=device) for spec in specs],
        block_size=block_size,
        device=device,
    )
    if model is not None:
        model.place(step)
    elif rope is not None:
        step.rotations = (RotaryEmbedding(rope, device)(step),)
    return step


def continuous_tensor(padded: Tensor, seq_length: Tensor | Sequence[int]) -> Tensor:
    """Return the rows of [B, S, ...] without their padding, concatenated: [T, ...], as layers take them."""
    lens = _lengths(padded, seq_length)
    return torch.cat([row[:length] for row, length in zip(padded, lens.tolist(), strict=True)])


def _lengths(rows: Tensor, seq_length: Tensor | Sequence[int] | None) -> Tensor:
    """Return the lengths of rows, int64 [B] on the CPU. Raises InvalidParameter."""
    lens = torch.as_tensor([rows.shape[1]] * len(rows) if seq_length is None else seq_length).cpu().long()
    if lens.shape != (len(rows),) or not len(lens) or not bool(((lens > 0) & (lens <= rows.shape[1])).all()):
        raise InvalidParameter(
            f"seq_length is {lens.tolist()}, where {len(rows)} lengths from 1 to {rows.shape[1]} belong.", "seq_length"
        )
    return lens
