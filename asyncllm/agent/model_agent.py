"""The model side of a step: state tables, forward pass, scoring, sampling."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from asyncllm.agent.host_pool import allocate_host_pool, swap_blocks
from asyncllm.agent.inputs import SlotTables
from asyncllm.agent.kv_cache import allocate_pool, host_blocks, pool_blocks
from asyncllm.agent.opening import OpenedModel
from asyncllm.agent.pooled_hidden import PooledHidden
from asyncllm.agent.prompt_scores import PromptScores
from asyncllm.agent.residence import Residence
from asyncllm.agent.sampler import NOT_FINITE, Sampler
from asyncllm.batch import Batch, Command, StartTimes, StepOutput
from asyncllm.config import EngineConfig
from asyncllm.errors import UnsupportedFeature
from asyncllm.kernels import PagedKV, copy_blocks
from asyncllm.models.decoder import DecoderLM

__all__ = ["ModelAgent"]


class ModelAgent:
    """A model with its KV pool, slot tables and sampling state; runs steps one after another.

    All methods belong to one thread. `limits` is what the engine has to know.
    """

    def __init__(
        self, config: EngineConfig, path: Path, *, model: DecoderLM | None = None, times: StartTimes | None = None
    ) -> None:
        """Load the checkpoint in the folder `path`, unless its `model` is given, and size the KV pool.

        `times` is the clock of a start that has begun already.

        Raises ModelError when the checkpoint cannot be loaded or no block fits, InvalidParameter when `session_len`
        asks for more positions than the model has, and UnsupportedFeature for what only a GPU can do.
        """
        if config.batch_invariant:
            raise UnsupportedFeature(
                "batch_invariant: the matrix products of a CPU round differently for different batch sizes. Use a GPU, "
                "or batch_invariant=False.",
                "batch_invariant",
            )
        times = times or StartTimes()
        opened = OpenedModel.open(config, path, model=model, times=times)
        model, device, dtype, max_position, _ = opened
        block_size = config.tokens_per_block
        num_blocks = pool_blocks(config, model.config, max_position=max_position, dtype=dtype, device=device)
        num_host_blocks = host_blocks(config, model.config, num_blocks, dtype=dtype)
        # A whole batch may end while the next one, in other slots, is in flight already.
        num_slots = 2 * config.max_batch_size
        self.model = model
        self._dtype, self._device = dtype, device
        self._num_blocks, self._num_host_blocks, self._block_size = num_blocks, num_host_blocks, block_size
        self._residence = Residence(opened)
        self.take_cache()
        self._tables = SlotTables(num_slots, max_position, block_size, device, rope_lens=model.config.dynamic_rope)
        self._sampler = Sampler(num_slots, model.config.vocab_size, device)
        self._not_finite: set[int] = set()
        times.lap("pool")
        self.limits = opened.limits(
            num_blocks, block_size, num_slots, num_host_blocks=num_host_blocks, start_seconds=times.seconds
        )

    def take_cache(self) -> None:
        """Allocate the KV pools. Raises ModelError when the memory is not there."""
        config = self.model.config
        self._pool = allocate_pool(config, self._num_blocks, self._block_size, self._dtype, self._device)
        self._host_pool = allocate_host_pool(config, self._num_host_blocks, self._block_size, self._dtype)
        self._caches = [PagedKV.over(pages) for pages in self._pool]

    def release_cache(self) -> None:
        """Give the KV pools back. Slots that were started before are not to be used any more."""
        self._pool = self._host_pool = torch.empty(0)
        self._caches = []

    def carry_out(self, command: Command) -> None:
        """See `Residence.carry_out`."""
        self._residence.carry_out(command, self)

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepOutput:
        """Run one step. A row that fails is named in `StepOutput.errors`; what raises here concerns the whole step,
        whose slots are of use again once they are started anew."""
        began = time.perf_counter()
        for start in batch.starts:
            self._not_finite.discard(start.slot)
            self._tables.start(start)
            self._sampler.start(start)
        for slot, index, blocks in batch.new_blocks:
            self._tables.write_blocks(slot, index, blocks)
        swap_blocks(batch.swaps, self._pool, self._host_pool)
        if batch.copies:
            pairs = torch.tensor(batch.copies, dtype=torch.int64, device=self._device)
            copy_blocks(self._pool, pairs[:, 0], pairs[:, 1])
        output = StepOutput(step=batch.step, slots=[], tokens=[])
        if batch.decode or batch.prefill:
            try:
                self._forward(batch, output)
            except BaseException:
                for slot in (*batch.decode, *(row.slot for row in batch.prefill)):
                    self._make_finite(slot)
                raise
        output.elapsed_ms = (time.perf_counter() - began) * 1e3
        return output

    def _forward(self, batch: Batch, output: StepOutput) -> None:
        inputs, rows = self._tables.build(batch)
        hidden = self.model(inputs, self._caches)
        for row, first in zip(batch.prefill, rows.prefill_starts, strict=True):
            # A chunk that nothing is sampled from is looked at too: its KV must not outlive it with a NaN inside.
            if not hidden[first : first + len(row.tokens)].sum(dtype=torch.float32).isfinite():
                output.errors[row.slot] = NOT_FINITE
            if row.scored:
                PromptScores(row, hidden[first : first + len(row.tokens)], self.model.logits).write(output)
        wanted = hidden
        if rows.indices is not None:
            wanted = hidden[torch.from_numpy(rows.indices).to(self._device)]
        if any(row.pooling is not None for row in batch.prefill):
            PooledHidden(batch, rows, hidden, wanted).write(output)
        if len(rows.slots):
            logits = self.model.logits(wanted[: len(rows.slots)])
            sampled = self._sampler.sample(logits.float(), rows.slots, rows.positions)
            self._tables.set_last_tokens(rows.slots, sampled.tokens)
            output.slots = rows.slots.tolist()
            output.tokens = sampled.token_list
            output.logprobs = sampled.logprobs
            output.errors.update(sampled.errors)
        self._contain(batch, output)

    def _contain(self, batch: Batch, output: StepOutput) -> None:
        """Keep what is not finite inside the sequence that computed it.

        Its blocks are rid of NaN and infinity, for their next owner multiplies masked entries by 0, which does not
        remove either; finite entries, which other sequences may share, keep their values. As the sequence's KV is wrong
        from then on, it fails in each step until its slot is started anew.
        """
        if self._not_finite:
            output.errors |= dict.fromkeys(self._not_finite.intersection(batch.decode), NOT_FINITE)
            output.errors |= dict.fromkeys(self._not_finite.intersection(row.slot for row in batch.prefill), NOT_FINITE)
        for slot, error in output.errors.items():
            if error is NOT_FINITE:
                self._not_finite.add(slot)
                self._make_finite(slot)

    def _make_finite(self, slot: int) -> None:
        blocks = torch.from_numpy(self._tables.blocks(slot).astype(np.int64)).to(self._device)
        for cache in self._caches:
            for pages in (cache.k, cache.v):
                pages[blocks] = pages[blocks].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
