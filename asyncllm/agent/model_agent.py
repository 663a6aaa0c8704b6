"""The model side of a step: state tables, forward pass, scoring, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.inputs import SlotTables
from asyncllm.agent.kv_cache import allocate_pool, pool_blocks
from asyncllm.agent.sampler import NOT_FINITE, Sampler, rank_tokens
from asyncllm.batch import Batch, Limits, PrefillRow, StepOutput
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.kernels.cache import copy_blocks
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import open_model

__all__ = ["ModelAgent"]

_SCORED_POSITIONS = 512
"""Most positions whose logits are in memory at once when a prompt is scored."""


class ModelAgent:
    """A model with its KV pool, slot tables and sampling state; runs steps one after another.

    All methods belong to one thread. `limits` is what the engine has to know.
    """

    def __init__(self, config: EngineConfig, path: Path, *, open_model: Callable[..., DecoderLM] = open_model) -> None:
        """Load the checkpoint in the folder `path` with `open_model` and size the KV pool.

        Raises ModelError when the checkpoint cannot be loaded or no block fits, and InvalidParameter when
        `session_len` asks for more positions than the model has.
        """
        device = _device(config)
        dtype = _dtype(config, path, device)
        model = open_model(
            path,
            dtype=dtype,
            device=device,
            session_len=config.session_len,
            rope_scaling_factor=config.rope_scaling_factor,
            hf_overrides=config.hf_overrides,
        )
        max_position = _max_position(config, model)
        block_size = config.tokens_per_block
        num_blocks = pool_blocks(config, model.config, max_position=max_position, dtype=dtype, device=device)
        # A whole batch may end while the next one, in other slots, is in flight already.
        num_slots = 2 * config.max_batch_size
        self._model = model
        self._caches = allocate_pool(model.config, num_blocks, block_size, dtype, device)
        self._tables = SlotTables(num_slots, max_position, block_size, device, rope_lens=model.config.dynamic_rope)
        self._sampler = Sampler(num_slots, model.config.vocab_size, device)
        self._device = device
        self.limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_position=max_position,
            vocab_size=model.config.vocab_size,
            num_slots=num_slots,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            architecture=model.config.architecture,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            model_path=str(path),
        )

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepOutput:
        """Run one step. A row that fails is named in `StepOutput.errors`; what raises here concerns the whole step."""
        began = time.perf_counter()
        for start in batch.starts:
            self._tables.start(start)
            self._sampler.start(start)
        for slot, index, blocks in batch.new_blocks:
            self._tables.write_blocks(slot, index, blocks)
        if batch.copies:
            pairs = torch.tensor(batch.copies, dtype=torch.int64, device=self._device)
            copy_blocks(self._caches, pairs[:, 0], pairs[:, 1])
        output = StepOutput(step=batch.step, slots=[], tokens=[])
        if batch.decode or batch.prefill:
            self._forward(batch, output)
        output.elapsed_ms = (time.perf_counter() - began) * 1e3
        return output

    def _forward(self, batch: Batch, output: StepOutput) -> None:
        inputs, rows = self._tables.build(batch)
        hidden = self._model(inputs, self._caches)
        for row, first in zip(batch.prefill, rows.prefill_starts, strict=True):
            # A chunk that nothing is sampled from is looked at too: its KV must not outlive it with a NaN inside.
            if not hidden[first : first + len(row.tokens)].sum().isfinite():
                output.errors[row.slot] = NOT_FINITE
            if row.output_logits or row.prompt_logprobs is not None:
                self._score(row, hidden[first : first + len(row.tokens)], output)
        if len(rows.slots):
            if rows.indices is not None:
                hidden = hidden[torch.from_numpy(rows.indices).to(self._device)]
            sampled = self._sampler.sample(self._model.logits(hidden), rows.slots, rows.positions)
            self._tables.set_last_tokens(rows.slots, sampled.tokens)
            output.slots = rows.slots.tolist()
            output.tokens = sampled.token_list
            output.logprobs = sampled.logprobs
            output.errors.update(sampled.errors)
        for slot, error in output.errors.items():
            if error is NOT_FINITE:
                self._zero_non_finite(slot)

    def _score(self, row: PrefillRow, hidden: Tensor, output: StepOutput) -> None:
        """Write the row's prompt log-probabilities and logits from its hidden states [chunk, H] into `output`."""
        successors = row.tokens[1:] if row.next_token is None else [*row.tokens[1:], row.next_token]
        num_top = row.prompt_logprobs
        length = len(hidden) if row.output_logits else len(successors)
        ranked = []
        whole = torch.empty(len(hidden) if row.output_logits else 0, self.limits.vocab_size)
        for begin in range(0, length, _SCORED_POSITIONS):
            logits = self._model.logits(hidden[begin : begin + _SCORED_POSITIONS])
            if not logits.amax().isfinite():
                output.errors[row.slot] = NOT_FINITE
            if row.output_logits:
                whole[begin : begin + len(logits)] = logits
            if num_top is not None:
                known = successors[begin : begin + len(logits)]
                if known:
                    tokens = torch.tensor(known, dtype=torch.int64, device=self._device)
                    ranked += rank_tokens(logits[: len(known)], tokens, [num_top] * len(known))
        if row.output_logits:
            output.logits[row.slot] = whole
        if num_top is not None:
            output.prompt_logprobs[row.slot] = ranked

    def _zero_non_finite(self, slot: int) -> None:
        """Zero what is not finite in the slot's blocks: their next owner multiplies masked entries by 0, which does not
        remove NaN. Finite entries, which other sequences may share, keep their values."""
        blocks = torch.from_numpy(self._tables.blocks(slot).astype(np.int64)).to(self._device)
        for cache in self._caches:
            for pages in cache:
                pages[blocks] = pages[blocks].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device_type == "cuda" and not available:
        raise InvalidParameter(
            "device_type is 'cuda', but torch finds no CUDA device here. Use device_type='cpu' or 'auto'.",
            "device_type",
        )
    return torch.device("cuda" if available and config.device_type != "cpu" else "cpu")


def _dtype(config: EngineConfig, path: Path, device: torch.device) -> torch.dtype:
    """The type of weights, activations and KV: `auto` means float32 on a CPU and the checkpoint's own on a GPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_position(config: EngineConfig, model: DecoderLM) -> int:
    """Positions that a session may use: `session_len` if given, else all that the model has."""
    limit = model.config.max_position
    if config.session_len is None:
        return limit
    if config.session_len > limit:
        raise InvalidParameter(
            f"session_len is {config.session_len}, but the model has {limit} positions after rotary scaling. "
            f"Lower session_len, or extend the model with rope_scaling_factor.",
            "session_len",
        )
    return config.session_len
