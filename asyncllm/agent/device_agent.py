"""DeviceAgent: launches steps on a device without waiting for any of them.

    launch(N)      uploads what is new, launches forward pass, sampling and the download of the tokens
    launch(N + 1)  the same, while N runs: it reads N's tokens from the device's tables
    PendingStep N  waits for its download, and becomes a StepOutput

Decode steps are replayed from CUDA graphs, and so are all layers but the last one of steps with few prompt tokens;
longer ones are launched kernel by kernel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.agent.device_sampler import DeviceSampler
from asyncllm.agent.device_tables import DeviceStep, DeviceTables
from asyncllm.agent.graphs import StepGraphs, bucket_sizes, smallest_for
from asyncllm.agent.halves import decode_rows, prefill_halves
from asyncllm.agent.host_pool import MIN_COPIED_TOKENS, BlockTransfers, allocate_host_pool, staging_bytes
from asyncllm.agent.kv_cache import allocate_pool, host_blocks, pool_blocks
from asyncllm.agent.lost_device import abandon
from asyncllm.agent.mixed_size import LARGEST_MIXED, MixedSize, mixed_sizes
from asyncllm.agent.opening import OpenedModel
from asyncllm.agent.pending_step import PendingStep
from asyncllm.agent.pooled_hidden import PooledHidden
from asyncllm.agent.prompt_scores import PromptScores
from asyncllm.agent.residence import Residence
from asyncllm.agent.thread_state import own_thread_state
from asyncllm.agent.transfers import MAX_STEPS_IN_FLIGHT, Transfers
from asyncllm.agent.upload import upload
from asyncllm.agent.warm_up import CapturedPart, largest_step, measure_reserve, warm_up_batches, warm_up_mlps
from asyncllm.batch import Batch, Command, Limits, PrefillRow, StartTimes, SwapPlan
from asyncllm.config import EngineConfig
from asyncllm.kernels import PagedKV
from asyncllm.models.decoder import DecoderLM

__all__ = ["DeviceAgent"]

_LOOK_AHEAD_BYTES = 16 * 10**9
"""Weights that steps in flight should read: some 4 ms of an H200's memory."""

_TOKEN_TILE = 128
"""Matrix products of Llama-3-8B on an H200 take 0.62 us a token for 512 or 640 tokens, 0.65 us for 384, and 0.65 to
0.92 us between these (0.92 us for 448)."""

_FEW_BLOCKS = 2
"""A pool to measure steps with, before the real one is sized."""

_FORWARD, _SAMPLE, _MIXED = "forward", "sample", "mixed"
"""Captured parts: the two of a decode step, and what is captured of a step that has prompt tokens."""

OUT_OF_MEMORY = (
    "The device had no memory left to compute or score this prompt, even in parts. Lower max_prefill_token_num or "
    "cache_max_entry_count."
)


class DeviceAgent:
    """A model with its KV pool, slot tables, sampling state and graphs.

    Made in one thread; after that all methods belong to one thread again, which may be another. `limits` is what the
    engine has to know.
    """

    def __init__(
        self, config: EngineConfig, path: Path, *, model: DecoderLM | None = None, times: StartTimes | None = None
    ) -> None:
        """Load the checkpoint in the folder `path`, unless its `model` is given, size the KV pool, capture graphs.

        `times` is the clock of a start that has begun already.

        Raises ModelError when the checkpoint cannot be loaded or no block fits, and InvalidParameter when
        `session_len` asks for more positions than the model has.
        """
        times = times or StartTimes()
        opened = OpenedModel.open(config, path, model=model, times=times)
        if config.batch_invariant:
            opened.model.make_batch_invariant()
        self.model, self._device, self._dtype = opened.model, opened.device, opened.dtype
        self.on_gpu = self._device.type == "cuda"
        self._transfers = Transfers(self._device)
        self._unsampled: tuple[PendingStep, Callable[[], None]] | None = None
        """The step whose sampling waits until all before it are read, and what launches it."""
        self._unread: deque[PendingStep] = deque()
        """Launched steps whose output nobody has read, oldest first. Also for `abandon`: the device may write what they
        hold."""
        self._decode_sizes = bucket_sizes(config.max_batch_size)
        self._mixed_sizes: list[MixedSize] = []
        if self.model.config.num_layers > 1 and not config.batch_invariant:
            self._mixed_sizes = mixed_sizes(config.max_batch_size, config.prefill_budget)
        self._block_size = config.tokens_per_block
        self._residence = Residence(opened)
        # A whole batch may end while the next one, in other slots, is in flight already.
        num_slots = 2 * config.max_batch_size
        with torch.inference_mode(), self._transfers.computing():
            self._allocate_state(config, opened, num_slots, max_rows=max(self._decode_sizes[-1], config.max_batch_size))
            model_config, dtype = self.model.config, opened.dtype
            num_blocks = pool_blocks(
                config,
                model_config,
                max_position=opened.max_position,
                dtype=dtype,
                device=self._device,
                reserve=self._measure(config, opened) + staging_bytes(config, model_config, dtype),
            )
            self._num_blocks = num_blocks
            self._num_host_blocks = num_host_blocks = host_blocks(config, model_config, num_blocks, dtype=dtype)
            self._allocate_pools()
            times.lap("pool")
            self._graphs = self._capture()
            if self.on_gpu:
                warm_up_mlps(self.model, config.prefill_budget + config.max_batch_size)
        self.limits: Limits = opened.limits(
            num_blocks,
            config.tokens_per_block,
            num_slots,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=MIN_COPIED_TOKENS if self.on_gpu else 1,
            token_tile=_TOKEN_TILE if self.on_gpu else 1,
            tokens_beside_decode=LARGEST_MIXED if self.on_gpu else None,
            max_steps_in_flight=_steps_ahead(self.model) if self.on_gpu else 2,
            start_seconds=times.seconds,  # the clock's own, which gets its last entry below
        )
        if self.on_gpu:
            self._warm_up(min(config.prefill_budget, opened.max_position))
        times.lap("capture")

    def _allocate_state(self, config: EngineConfig, opened: OpenedModel, num_slots: int, *, max_rows: int) -> None:
        """Tables by slot, and the tensors that captured steps read and write."""
        self._tables = DeviceTables(
            num_slots=num_slots,
            max_rows=max_rows,
            max_position=opened.max_position,
            block_size=config.tokens_per_block,
            rope_lens=self.model.config.dynamic_rope,
            batch_invariant=config.batch_invariant,
            device=self._device,
            mixed=self._mixed_sizes,
        )
        vocab_size = self.model.config.vocab_size
        self.sampler = DeviceSampler(num_slots, vocab_size, self._device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._drawn_positions = torch.zeros(max_rows, dtype=torch.int32, device=self._device)
        self._flags = torch.zeros(max_rows, dtype=torch.int32, device=self._device)
        self._results = torch.zeros(2 * max_rows, dtype=torch.int32, device=self._device)
        self._no_flags = torch.zeros(0, dtype=torch.int32, device=self._device)
        # A model with a final softcap gives float32.
        logits = self.model.logits(
            torch.zeros(1, self.model.config.hidden_size, dtype=self._dtype, device=self._device)
        )
        self._logits = torch.zeros(max_rows, vocab_size, dtype=logits.dtype, device=self._device)
        most = max((size.tokens for size in self._mixed_sizes), default=0)
        self._residual = torch.zeros(most, self.model.config.hidden_size, dtype=self._dtype, device=self._device)

    def _allocate_pool(self, num_blocks: int) -> None:
        """The KV pool, and what attention sees of it: one cache per layer."""
        self._pool = allocate_pool(self.model.config, num_blocks, self._block_size, self._dtype, self._device)
        self._caches = [PagedKV.over(pages) for pages in self._pool]

    def _allocate_pools(self) -> None:
        """The whole KV pool, the host's if there is one, and the way between them."""
        self._allocate_pool(self._num_blocks)
        self._swaps: BlockTransfers | None = None
        if self._num_host_blocks:
            host = allocate_host_pool(self.model.config, self._num_host_blocks, self._block_size, self._dtype)
            self._swaps = BlockTransfers(self._pool, host)

    def take_cache(self) -> None:
        """Allocate the KV pools again and capture the graphs, which hold addresses. The kernels are compiled already.

        Raises ModelError or torch.OutOfMemoryError, and holds nothing then.
        """
        try:
            with own_thread_state(self._device.type), self._transfers.computing():
                self._allocate_pools()
                self._graphs = self._capture()
        except BaseException:
            self.release_cache()
            raise

    def release_cache(self) -> None:
        """Give KV pools and graphs back. Slots that were started before are not to be used any more."""
        self._graphs = self._swaps = None
        self._pool, self._caches = torch.empty(0), []

    def carry_out(self, command: Command) -> None:
        """See `Residence.carry_out`. No step is in flight; any one thread may call it."""
        with self._transfers.computing():
            self._residence.carry_out(command, self)

    def _measure(self, config: EngineConfig, opened: OpenedModel) -> int:
        """Bytes that steps take beside weights and KV, found out with a pool of a few blocks."""
        if self._transfers.stream is None:
            return 0
        self._allocate_pool(_FEW_BLOCKS)
        step = largest_step(
            config.max_batch_size,
            _prompts(config.prefill_budget, opened.max_position),
            config.tokens_per_block,
            _FEW_BLOCKS,
            rope_lens=self.model.config.dynamic_rope,
            batch_invariant=config.batch_invariant,
        )
        reserve = measure_reserve(self.model, step, self._caches, self._captured_parts(), self._transfers.stream)
        del self._pool, self._caches
        torch.cuda.empty_cache()
        return reserve

    def _captured_parts(self) -> list[CapturedPart]:
        """What becomes graphs, of which sizes."""
        return [
            CapturedPart(_MIXED, self._mixed_residual, self._mixed_sizes, self._tables.empty_mixed),
            CapturedPart(_FORWARD, self._decode_logits, self._decode_sizes),
            CapturedPart(_SAMPLE, self._decode_tokens, self._decode_sizes),
        ]

    def _capture(self) -> StepGraphs | None:
        """Parts of steps over the whole pool as graphs; None where there are no graphs."""
        if self._transfers.stream is None:
            return None
        graphs = StepGraphs(self._transfers.stream)
        for part in self._captured_parts():
            part.capture(graphs, part.sizes)
        self._transfers.stream.synchronize()
        return graphs

    def _warm_up(self, max_tokens: int) -> None:
        """Run steps of all sizes that ask for everything, so that nothing is compiled later, in the event loop."""
        limits = self.limits
        for batch in warm_up_batches(limits.num_blocks, limits.block_size, max_tokens, limits.max_position):
            if self._swaps is not None:
                batch.swaps = SwapPlan(swap_out=[(0, 0)], swap_in=[(0, 0)])
            pending = self.launch(batch)
            pending.wait()
            pending.output()

    def launch(self, batch: Batch) -> PendingStep:
        """Launch a step. A row that fails is named in its `StepOutput.errors`; what raises here or in `output` concerns
        the whole step, if the device `survives` it, and else all after it, as does what raises in `wait`."""
        if self.blocked or len(self._unread) >= MAX_STEPS_IN_FLIGHT:
            raise RuntimeError("no step can be launched before another one has been read")
        with own_thread_state(self._device.type), self._transfers.computing():
            pending = PendingStep(batch, self.sampler, on_gpu=self.on_gpu, on_read=self._unread_no_more)
            self._unread.append(pending)
            try:
                self._launch(batch, pending)
            except BaseException:
                self._unread_no_more(pending)
                self._tables.forget_updates()
                raise
        return pending

    def survives(self, error: BaseException) -> bool:
        """Whether the device still works after `launch`, `resume` or a step's `output` has raised this.

        A device that does not is lost, and this agent is never freed.
        """
        lost = isinstance(error, torch.AcceleratorError)
        try:
            # What the driver has not reported yet it reports here; nobody waits for the stream.
            if self._transfers.stream is not None:
                self._transfers.stream.query()
        except RuntimeError:
            lost = True
        if lost:
            abandon(self)
        return isinstance(error, Exception) and not lost

    def _launch(self, batch: Batch, pending: PendingStep) -> None:
        for start in batch.starts:
            self._tables.start(start)
            self.sampler.start(start)
        for slot, index, blocks in batch.new_blocks:
            self._tables.write_blocks(slot, index, blocks)
        if self._swaps is not None:
            self._swaps.launch(batch.swaps)
        self.sampler.upload()
        if self._graphs is not None and self._tables.fits(batch, self._decode_sizes[-1]):
            self._launch_decode(batch, pending, self._graphs)
        else:
            self._launch_mixed(batch, pending, self._graphs)

    def _unread_no_more(self, pending: PendingStep) -> None:
        self._unread.remove(pending)

    @property
    def blocked(self) -> bool:
        """Whether nothing can be launched before `resume` has launched the sampling of the last step."""
        return self._unsampled is not None

    def resume(self) -> PendingStep | None:
        """Launch the sampling that waited, if all steps before it have been read. Returns its step if so."""
        if self._unsampled is None:
            return None
        pending, sample = self._unsampled
        if self._unread[0] is not pending:
            return None
        self._unsampled = None
        with own_thread_state(self._device.type), self._transfers.computing():
            try:
                sample()
            except BaseException:
                self._unread_no_more(pending)
                raise
        return pending

    def _sample_when_possible(self, pending: PendingStep, sample: Callable[[], None]) -> None:
        """Launch the sampling now, unless it needs tokens on the host that no one has read yet."""
        if self._unread[0] is not pending and self.sampler.needs_host(pending.slots):
            self._unsampled = (pending, sample)
        else:
            sample()

    def _launch_decode(self, batch: Batch, pending: PendingStep, graphs: StepGraphs) -> None:
        """A step of decode rows alone, out of the graphs."""
        num_rows = len(batch.decode)
        pending.slots = self._tables.advance_decode(batch)
        size = smallest_for(num_rows, self._decode_sizes)
        positions = self._tables.decode_drawn(num_rows)
        graphs.replay(_FORWARD, size)

        def sample() -> None:
            # The host may still be fetching what this overwrites.
            self._transfers.wait_for_downloads()
            graphs.replay(_SAMPLE, size)
            slots, tokens, flags = self._tables.decode_slots[:size], self._tokens[:size], self._flags[:size]
            results, logits = self._results[: 2 * size].view(2, size), self._logits[:num_rows]
            if self.sampler.edit_and_redraw(
                logits,
                pending.slots,
                positions,
                slots[:num_rows],
                self._drawn_positions[:num_rows],
                tokens[:num_rows],
                flags[:num_rows],
            ):
                kernels.record_tokens(tokens, flags, slots, self._tables.last_tokens, results)
            pending.logprobs = self.sampler.logprobs(logits, pending.slots, tokens[:num_rows])
            pending.download(self._transfers, [results, self._no_flags])

        self._sample_when_possible(pending, sample)

    def _decode_logits(self, num_rows: int) -> None:
        """Captured: forward pass of the fixed rows, to their logits."""
        hidden = self.model(self._tables.decode_inputs(num_rows), self._caches)
        self.model.logits(hidden, self._logits[:num_rows])

    def _decode_tokens(self, num_rows: int) -> None:
        """Captured: choice of the fixed rows' tokens."""
        slots, positions = self._tables.decode_slots[:num_rows], self._tables.decode_positions[:num_rows]
        tokens, flags = self._tokens[:num_rows], self._flags[:num_rows]
        drawn = torch.add(positions, 1, out=self._drawn_positions[:num_rows])
        self.sampler.draw(self._logits[:num_rows], slots, drawn, tokens, flags)
        results = self._results[: 2 * num_rows].view(2, num_rows)
        kernels.record_tokens(tokens, flags, slots, self._tables.last_tokens, results)

    def _mixed_residual(self, size: MixedSize) -> None:
        """Captured: all layers but the last one of a step with prompt tokens."""
        inputs = self._tables.mixed_inputs(size)
        self.model.before_last(inputs, self._caches, self._residual[: size.tokens])

    def _launch_mixed(self, batch: Batch, pending: PendingStep, graphs: StepGraphs | None) -> None:
        """Any step, with what can be of it out of the graphs."""
        if batch.copies:
            pairs = upload(np.array(batch.copies, np.int64), self._device)
            kernels.copy_blocks(self._pool, pairs[:, 0], pairs[:, 1])
        if not batch.decode and not batch.prefill:
            self._tables.flush()
            pending.download(self._transfers, [])
            return
        whole = any(row.scored for row in batch.prefill) or PooledHidden.reads_all(batch)
        whole = whole or self.model.config.num_layers < 2
        step = self._tables.advance(batch, captured=graphs is not None and not whole)
        rows = step.arrays.rows
        pending.slots = rows.slots
        if step.size is not None and graphs is not None:
            graphs.replay(_MIXED, step.size)
        if whole:
            step.sampled = None
        hidden, stream = self._forward(step, pending)
        unsound = self._no_flags
        if batch.prefill:
            # A chunk that nothing is sampled from is looked at too: its blocks may not enter the prefix cache.
            unsound = kernels.segments_finite(stream, step.prefill_offsets)
        for row, first in zip(batch.prefill, rows.prefill_starts, strict=True):
            if row.scored and row.slot not in pending.failed:
                score = partial(PromptScores, row, stream[first : first + len(row.tokens)], self.model.logits)
                self._launch_extra(pending, [row], score)
        pooled = [row for row in batch.prefill if row.pooling is not None]
        if pooled:
            self._launch_extra(pending, pooled, partial(PooledHidden, batch, rows, stream, hidden))
        logits = self.model.logits(hidden[: len(rows.slots)])

        def sample() -> None:
            count = len(rows.slots)
            tokens = torch.empty(count, dtype=torch.int64, device=self._device)
            flags = torch.empty(count, dtype=torch.int32, device=self._device)
            results = torch.empty(2, count, dtype=torch.int32, device=self._device)
            if count:
                self.sampler.draw(logits, step.slots, step.positions, tokens, flags)
                self.sampler.edit_and_redraw(
                    logits, rows.slots, rows.positions, step.slots, step.positions, tokens, flags
                )
                kernels.record_tokens(tokens, flags, step.slots, self._tables.last_tokens, results)
                pending.logprobs = self.sampler.logprobs(logits, rows.slots, tokens)
            pending.download(self._transfers, [results, unsound])

        self._sample_when_possible(pending, sample)

    @staticmethod
    def _launch_extra(
        pending: PendingStep, rows: Sequence[PrefillRow], launch: Callable[[], PromptScores | PooledHidden]
    ) -> None:
        """Launch what prefill rows ask for besides a token. Whole logits may be too much, for these rows alone."""
        try:
            pending.extras.append(launch())
        except torch.OutOfMemoryError:
            pending.failed |= dict.fromkeys((row.slot for row in rows), OUT_OF_MEMORY)

    def _forward(self, step: DeviceStep, pending: PendingStep) -> tuple[Tensor, Tensor]:
        """Hidden states of the tokens of `step.indices` [R + L, H], and of all tokens [T, H]: the latter before the
        last layer, or after it if `step.sampled` is None.

        When memory runs out, prompt tokens are computed in two halves, once; if that fails as well their rows fail, and
        the decode rows go on.
        """
        try:
            if step.sampled is not None:
                if step.size is None:
                    residual = self.model.before_last(step.inputs, self._caches)
                else:
                    residual = self._residual[: step.size.tokens]
                return self.model.last_hidden(residual, step.inputs, self._caches, step.sampled), residual
            hidden: Tensor = self.model(step.inputs, self._caches)
            return kernels.gather_rows(hidden, step.indices), hidden
        except torch.OutOfMemoryError:
            num_decode = step.arrays.num_decode
            if num_decode == len(step.arrays.row_slots):
                raise
        torch.cuda.empty_cache()
        config = self.model.config
        shape = (len(step.arrays.positions), config.hidden_size)
        hidden = torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)
        if num_decode:
            hidden[:num_decode] = self.model(decode_rows(step.inputs, num_decode), self._caches)
        try:
            for tokens, inputs in prefill_halves(step.arrays, step.inputs):
                hidden[tokens] = self.model(inputs, self._caches)
        except torch.OutOfMemoryError:
            pending.failed = {row.slot: OUT_OF_MEMORY for row in pending.batch.prefill}
            hidden[num_decode:] = torch.nan
        return kernels.gather_rows(hidden, step.indices), hidden


def _steps_ahead(model: DecoderLM) -> int:
    """Steps to launch before the oldest is read: two, or more where they are so short that the host would be late.

    A step reads all weights once. Rows do not count, nor does any measurement, so that batches are the same
    from run to run: a row that stops is in the batch until its last launched step.
    """
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return max(2, min(MAX_STEPS_IN_FLIGHT, math.ceil(_LOOK_AHEAD_BYTES / num_bytes)))


def _prompts(num_tokens: int, longest: int) -> list[int]:
    """Lengths of the fewest prompts with so many tokens in all."""
    full, rest = divmod(num_tokens, longest)
    return [longest] * full + [rest] * (rest > 0)
