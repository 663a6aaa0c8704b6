"""ModelAgent: the model side of the engine. It launches steps without waiting for any of them.

    launch(N)      uploads what is new, launches forward pass, sampling and the download of the tokens
    launch(N + 1)  does the same while a GPU runs N, whose tokens it reads from the device's tables
    PendingStep N  waits for its download, and becomes a StepOutput

On a GPU, decode steps are replayed from CUDA graphs, and so are all layers but the last of steps with few prompt
tokens. Longer steps are launched kernel by kernel, like every step on a CPU, where the step is computed when `launch`
returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncllm import kernels
from asyncllm.agent.cache.host_pool import MIN_COPIED_TOKENS, BlockTransfers, allocate_host_pool, staging_bytes
from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import allocate_pool, host_blocks, pool_blocks
from asyncllm.agent.device.graphs import StepGraphs, bucket_sizes, smallest_for
from asyncllm.agent.device.streams import MAX_STEPS_IN_FLIGHT, Streams, upload
from asyncllm.agent.image_features import ImageFeatures
from asyncllm.agent.open_model import OpenedModel
from asyncllm.agent.pending_step import PendingStep, abandon
from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.agent.sleep import ModelPlacement
from asyncllm.agent.step.fixed_rows import FixedRows
from asyncllm.agent.step.graph_sizes import LARGEST_MIXED, MixedSize, mixed_sizes
from asyncllm.agent.step.mixed_steps import MixedSteps
from asyncllm.agent.step.tables import SlotTables
from asyncllm.agent.warm_up import (
    CapturedPart,
    largest_step,
    measure_reserve,
    prompt_lengths,
    warm_up_batches,
    warm_up_mlps,
)
from asyncllm.config import EngineConfig
from asyncllm.distributed.group import RankGroup
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch, Command, Limits, LoadAdapter, StartTimes, StepOutput, SwapPlan

__all__ = ["ModelAgent"]

_TOKEN_TILE = 128
"""Matrix products of Llama-3-8B on an H200 take 0.62 us per token for 512 or 640 tokens, 0.65 us for 384, and 0.65 to
0.92 us in between (0.92 us for 448)."""

_MEASURED_BLOCKS = 2
"""Size of the pool that steps are measured with before the real one is sized."""

_FORWARD, _SAMPLE, _MIXED = "forward", "sample", "mixed"
"""Captured parts: the two parts of a decode step, and the one of a step with prompt tokens."""

_SAMPLE_LISTS = "sample from lists"
"""The second part of a decode step for which ranks need no whole rows of logits."""

_ADAPTED = {_FORWARD: "forward with adapters", _MIXED: "mixed with adapters"}
"""The same parts for steps in which a token has an adapter, so that adapters cost other steps nothing."""


class ModelAgent:
    """A model with its KV pool, slot tables, sampling state and graphs. `limits` describes it to the engine.

    One thread creates it. After that, a single thread, the same or another, makes all calls.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        *,
        model: DecoderLM | None = None,
        times: StartTimes | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """Load the checkpoint in the folder `path`, size the KV pool, capture graphs.

        `model`: the loaded model, if there is one. `times`: the clock of a start that is already under way. In a
        `group` the model is this rank's share, and all ranks run the same steps in the same order.

        Raises ModelError if the checkpoint cannot be loaded or no block fits, InvalidParameter if `session_len` asks
        for more positions than the model has.
        """
        times = times or StartTimes()
        opened = OpenedModel.open(config, path, model=model, times=times, group=group)
        if config.batch_invariant:
            opened.model.make_batch_invariant()
        self.model, self._device, self._dtype = opened.model, opened.device, opened.dtype
        self._captured_context = self.model.captured_context
        self._streams = Streams(self._device)
        self._unsampled: tuple[PendingStep, Callable[[], None]] | None = None
        """The step whose sampling waits until all earlier steps are read, and the function that launches it."""
        self._unread: deque[PendingStep] = deque()
        """Launched steps whose output is unread, oldest first. `abandon` keeps their memory, which a lost device may
        still write."""
        self._decode_sizes = bucket_sizes(config.max_batch_size)
        self._mixed_sizes: list[MixedSize] = []
        if self.model.config.num_layers > 1 and not config.batch_invariant:
            self._mixed_sizes = mixed_sizes(config.max_batch_size, config.prefill_budget)
        self._layout = CacheLayout(
            opened.cache_specs, config.tokens_per_block, self._dtype, longest=opened.max_position
        )
        tower, most = self.model.vision, config.vision_max_batch_size
        self._images = None if tower is None else ImageFeatures(tower, most, self._dtype, self._device)
        self._in_group = group is not None
        """Whether other ranks take part in each step, so that this rank must not change how it is computed."""
        # A whole batch may end while the next one is already in flight in other slots.
        num_slots = 2 * config.max_batch_size
        with torch.inference_mode(), self._streams.computing():
            self._placement = ModelPlacement(opened, config)
            self._allocate_state(config, opened, num_slots, max_rows=max(self._decode_sizes[-1], config.max_batch_size))
            num_blocks = pool_blocks(
                config,
                self._layout,
                max_position=opened.max_position,
                device=self._device,
                reserve=self._measure(config, opened) + staging_bytes(config, self._layout),
            )
            self._num_blocks = num_blocks = opened.min_over_ranks(num_blocks)
            num_host_blocks = opened.min_over_ranks(host_blocks(config, self._layout, num_blocks))
            self._num_host_blocks = num_host_blocks
            self._allocate_pools()
            times.lap("pool")
            self._graphs = self._capture()
            if self._streams.on_gpu:
                self._warm_up_mlps(config)
        self.limits: Limits = opened.limits(
            num_blocks,
            config.tokens_per_block,
            num_slots,
            windows=self._layout.windows,
            keeps_state=self._layout.keeps_state,
            num_host_blocks=num_host_blocks,
            **({} if self._placement.adapters is None else self._placement.adapters.limits()),
            min_copied_tokens=MIN_COPIED_TOKENS if self._streams.on_gpu else 1,
            token_tile=_TOKEN_TILE if self._streams.on_gpu else 1,
            tokens_beside_decode=LARGEST_MIXED if self._streams.on_gpu else None,
            max_steps_in_flight=opened.steps_ahead() if self._streams.on_gpu else 2,
            start_seconds=times.seconds,  # The clock's own dict, which gets its last entry below.
        )
        if self._streams.on_gpu:
            self._warm_up(min(config.prefill_budget, opened.max_position))
        times.lap("capture")

    def _allocate_state(self, config: EngineConfig, opened: OpenedModel, num_slots: int, *, max_rows: int) -> None:
        """Allocate the per-slot tables, and the tensors that captured steps read and write."""
        self._tables = SlotTables(
            num_slots=num_slots,
            max_rows=max_rows,
            max_position=opened.max_position,
            block_size=config.tokens_per_block,
            batch_invariant=config.batch_invariant,
            device=self._device,
            columns=self.model.step_columns,
            mixed=self._mixed_sizes,
            layer_groups=self._layout.layer_groups,
        )
        self.sampler = Sampler(num_slots, self.model.config.vocab_size, self._device, group=opened.group)
        self._fixed_rows = FixedRows(self.model, self._tables, self.sampler, max_rows=max_rows, dtype=self._dtype)
        self._no_flags = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._mixed = MixedSteps(
            self.model,
            self._tables,
            self.sampler,
            self._images,
            max_tokens=max((size.tokens for size in self._mixed_sizes), default=0),
            dtype=self._dtype,
            in_group=self._in_group,
            repeatable=not self._in_group and not self._layout.keeps_state,
        )

    def _allocate_pool(self, num_blocks: int) -> None:
        """Allocate the KV pool, and make each layer's cache over it."""
        self._pool = allocate_pool(self._layout, num_blocks, self._device)
        self._tables.caches = self._layout.caches(self._pool)

    def _allocate_pools(self) -> None:
        """Allocate the whole KV pool, and the host's pool and transfers if there is one."""
        self._allocate_pool(self._num_blocks)
        self._swaps: BlockTransfers | None = None
        if self._num_host_blocks:
            self._swaps = BlockTransfers(self._pool, allocate_host_pool(self._layout, self._num_host_blocks))

    def allocate_cache(self) -> None:
        """Allocate the KV pools again. On ModelError or torch.OutOfMemoryError, hold nothing."""
        try:
            with self._streams.launching():
                self._allocate_pools()
        except BaseException:
            self.release_cache()
            raise

    def capture(self) -> None:
        """Capture the graphs again, because they hold addresses. The kernels are already compiled."""
        with self._streams.launching():
            self._graphs = self._capture()

    def release_cache(self) -> None:
        """Free the KV pools and graphs. Slots that were started before must not be used again."""
        self._graphs = self._swaps = None
        self._pool, self._tables.caches = [], ()

    def carry_out(self, command: Command) -> None:
        """See `ModelPlacement.carry_out`. No step is in flight. Any thread may make this call."""
        if self._images is not None:
            self._images.clear()
        with self._streams.computing():
            self._placement.carry_out(command, self)

    def load_adapter(self, adapter: LoadAdapter) -> str:
        """See `AdapterPool.load`. Any thread may make this call, while steps run."""
        return self._placement.loaded_adapters.load(adapter)

    def drop_adapter(self, number: int) -> None:
        """Free the host memory of an adapter that no unread step names. Any thread may make this call."""
        self._placement.loaded_adapters.drop(number)

    def _measure(self, config: EngineConfig, opened: OpenedModel) -> int:
        """Return how many bytes steps take besides weights and KV cache, measured with a pool of a few blocks."""
        if self._streams.stream is None:
            return 0
        self._allocate_pool(_MEASURED_BLOCKS)
        step = largest_step(
            config.max_batch_size,
            prompt_lengths(config.prefill_budget, opened.max_position),
            config.tokens_per_block,
            _MEASURED_BLOCKS,
            caches=self._tables.caches,
            columns=self.model.step_columns,
            batch_invariant=config.batch_invariant,
            adapted=self._placement.adapters is not None,
            device=self._device,
        )
        reserve = measure_reserve(self.model, step, self._captured_parts(), self._streams.stream)
        if self._images is not None:
            reserve += self._images.measure(opened.path, config.hf_overrides)
        del step
        self.release_cache()
        torch.cuda.empty_cache()
        return reserve

    def _captured_parts(self) -> list[CapturedPart]:
        """Return the parts of steps to capture, with their sizes."""
        fixed = self._fixed_rows
        parts = [
            CapturedPart(_MIXED, self._mixed.compute_residual, self._mixed_sizes, self._tables.empty_mixed),
            CapturedPart(_FORWARD, fixed.compute, self._decode_sizes),
            CapturedPart(_SAMPLE, fixed.draw, self._decode_sizes, replayed=not self._in_group),
        ]
        if self._in_group:
            parts += [CapturedPart(_SAMPLE_LISTS, partial(fixed.draw, lists=True), self._decode_sizes)]
        if self._placement.adapters is not None:
            mixed, forward = partial(self._mixed.compute_residual, adapted=True), partial(fixed.compute, adapted=True)
            parts += [replace(parts[0], name=_ADAPTED[_MIXED], launch=mixed)]
            parts += [replace(parts[1], name=_ADAPTED[_FORWARD], launch=forward)]
        return parts

    def _capture(self) -> StepGraphs | None:
        """Return the captured graphs over the whole pool, or None on a CPU."""
        if self._streams.stream is None:
            return None
        graphs = StepGraphs(self._streams.stream)
        for part in self._captured_parts():
            part.make_ready(graphs)
        self._streams.stream.synchronize()
        return graphs

    def _warm_up_mlps(self, config: EngineConfig) -> None:
        max_tokens = config.prefill_budget + config.max_batch_size
        for adapted in (False, True) if self._placement.adapters else (False,):
            warm_up_mlps(self.model, max_tokens, adapted=adapted, batch_invariant=config.batch_invariant)

    def _warm_up(self, max_tokens: int) -> None:
        """Run steps of all sizes with every option, so that nothing is compiled later on the event loop."""
        limits = self.limits
        for slot in (-1,) if self._placement.adapters is None else (-1, 0):
            for batch in warm_up_batches(
                limits.num_blocks, limits.block_size, max_tokens, limits.max_position, adapter_slot=slot
            ):
                if self._swaps is not None:
                    batch.swaps = SwapPlan(swap_out=[(0, 0)], swap_in=[(0, 0)])
                pending = self.launch(batch)
                pending.wait()
                pending.output()

    def launch(self, batch: Batch) -> PendingStep:
        """Launch a step. `StepOutput.errors` names the rows that fail.

        An error here or in `PendingStep.output` ends the whole step. It also ends all later steps if the device does
        not survive it (`survives`), or if it comes from `PendingStep.wait`.
        """
        if self.blocked:
            raise RuntimeError("no step can be launched before another one has been read")
        with self._streams.launching():
            pending = PendingStep(batch, self.sampler, self._streams, on_read=self._mark_read)
            self._unread.append(pending)
            try:
                self._launch(batch, pending)
            except BaseException:
                self._mark_read(pending)
                self._tables.forget_updates()
                raise
        return pending

    def survives(self, error: BaseException) -> bool:
        """Return whether the device still works after this error of `launch`, `resume` or a step's `output`.

        If the device is lost, this agent is never freed.
        """
        lost = isinstance(error, torch.AcceleratorError)
        try:
            # Make the driver report a pending error.
            self._streams.check()
        except RuntimeError:
            lost = True
        if lost:
            abandon(self)
        return isinstance(error, Exception) and not lost

    def _launch(self, batch: Batch, pending: PendingStep) -> None:
        for start in batch.starts:
            if start.adapter_slot >= 0 and self._placement.adapters is not None:
                self._placement.adapters.put(start.adapter, start.adapter_slot)
            self._tables.start(start)
            self.sampler.start(start)
        for slot, group, index, blocks in batch.new_blocks:
            self._tables.write_blocks(slot, group, index, blocks)
        if self._swaps is not None:
            self._swaps.launch(batch.swaps)
        self.sampler.upload()
        graphs, longest = self._graphs, self._captured_context
        if longest is not None and self._tables.longest_context(batch) > longest:
            graphs = None
        if graphs is not None and self._tables.fits(batch, self._decode_sizes[-1]):
            self._launch_decode(batch, pending, graphs)
        else:
            self._launch_mixed(batch, pending, graphs)

    def _mark_read(self, pending: PendingStep) -> None:
        self._unread.remove(pending)

    def step(self, batch: Batch) -> StepOutput:
        """Launch a step and wait for it. All earlier steps have been read."""
        pending = self.launch(batch)
        pending.wait()
        return pending.output()

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is computed."""
        return self._streams.on_gpu

    @property
    def blocked(self) -> bool:
        """Whether `launch` has to wait until `resume` has launched the last step's sampling, or until a step has been
        read. The latter happens only to a rank that is slower than the first one, whose results the engine reads."""
        return self._unsampled is not None or len(self._unread) >= MAX_STEPS_IN_FLIGHT

    def resume(self) -> PendingStep | None:
        """Launch the waiting sampling if all earlier steps have been read. Return its step, or None."""
        if self._unsampled is None:
            return None
        pending, sample = self._unsampled
        if self._unread[0] is not pending:
            return None
        self._unsampled = None
        with self._streams.launching():
            try:
                sample()
            except BaseException:
                self._mark_read(pending)
                raise
        return pending

    def _sample_when_possible(self, pending: PendingStep, sample: Callable[[], None]) -> None:
        """Launch the sampling now, unless it needs the tokens of unread steps on the host."""
        if self._unread[0] is not pending and self.sampler.needs_host(pending.slots):
            self._unsampled = (pending, sample)
        else:
            sample()

    def _launch_decode(self, batch: Batch, pending: PendingStep, graphs: StepGraphs) -> None:
        """Launch a step of decode rows from the graphs."""
        num_rows = len(batch.decode)
        arrays = self._tables.advance_decode(batch)
        rows = arrays.rows
        pending.slots = rows.slots
        size = smallest_for(num_rows, self._decode_sizes)
        graphs.replay(_ADAPTED[_FORWARD] if arrays.adapted else _FORWARD, size)
        if self._placement.adapters is not None and arrays.adapted:
            self._placement.adapters.read_by_steps(arrays.adapter_slots)

        def sample() -> None:
            # The host may still be downloading what this overwrites.
            self._streams.wait_for_downloads()
            lists = self.sampler.takes_lists(rows.slots)
            if self._in_group and not lists:
                self._fixed_rows.draw(size)
            else:
                graphs.replay(_SAMPLE_LISTS if lists else _SAMPLE, size)
            results, pending.logprobs = self._fixed_rows.read(rows, size, lists=lists)
            pending.download([results, self._no_flags])

        self._sample_when_possible(pending, sample)

    def _launch_mixed(self, batch: Batch, pending: PendingStep, graphs: StepGraphs | None) -> None:
        """Launch any step, from the graphs as far as possible."""
        self._copy_blocks(batch)
        if not batch.decode and not batch.prefill:
            self._tables.flush()
            pending.download([])
            return
        mixed = self._mixed
        step = mixed.upload(batch, pending, captured=graphs is not None)
        rows = step.arrays.rows
        pending.slots = rows.slots
        if step.size is not None and graphs is not None:
            mixed.place_features(step)
            graphs.replay(_ADAPTED[_MIXED] if step.inputs.adapted else _MIXED, step.size)
        hidden, stream = mixed.forward(step, pending)
        if self._placement.adapters is not None and step.inputs.adapted:
            self._placement.adapters.read_by_steps(step.arrays.adapter_slots)
        unsound = self._no_flags
        if batch.prefill:
            # Chunks that do not sample are checked too: the blocks of an unsound one must not enter the prefix cache.
            unsound = kernels.segments_finite(stream, step.prefill_offsets)
        mixed.launch_extras(step, pending, hidden, stream)
        logits = self.model.rank_logits(hidden[: len(rows.slots)])

        def sample() -> None:
            self.sampler.follow(batch.prefill)
            pending.download([mixed.draw(step, logits, pending), unsound])

        self._sample_when_possible(pending, sample)

    def _copy_blocks(self, batch: Batch) -> None:
        if batch.copies:
            pairs = upload(np.array(batch.copies, np.int64), self._device)
            for part in self._pool:
                kernels.copy_blocks(part, pairs[:, 0], pairs[:, 1])
