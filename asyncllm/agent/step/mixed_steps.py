"""MixedSteps: forward pass, scores and draws of all steps but captured decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.agent.device.streams import upload
from asyncllm.agent.image_features import ImageFeatures, joint_tokens
from asyncllm.agent.pending_step import PendingStep
from asyncllm.agent.prompt_outputs import PooledHidden, PromptScores
from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.agent.step.graph_sizes import MixedSize
from asyncllm.agent.step.split_step import compute_in_parts
from asyncllm.agent.step.tables import SlotTables, StepTensors
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch, PrefillRow

__all__ = ["OUT_OF_MEMORY", "MixedSteps"]

OUT_OF_MEMORY = (
    "The device had no memory left to compute or score this prompt, even in parts. Lower max_prefill_token_num or "
    "cache_max_entry_count."
)


class MixedSteps:
    """Computes steps with prompt tokens, and all steps on a CPU; captured decode steps have `FixedRows`.

    A step is uploaded; its residual stream before the last layer is computed, by a graph if it has a size; then
    `forward` continues with the tokens whose hidden states are needed, and `draw` draws their next ones.
    """

    def __init__(
        self,
        model: DecoderLM,
        tables: SlotTables,
        sampler: Sampler,
        images: ImageFeatures | None,
        *,
        max_tokens: int,
        dtype: torch.dtype,
        in_group: bool,
        repeatable: bool,
    ) -> None:
        """`max_tokens`: tokens of the largest captured step; `dtype`: of hidden states. `in_group`: other ranks take
        part in each step, so that this rank must not change how it is computed. `repeatable`: a step that has run out
        of memory may be computed again, because neither states nor other ranks have advanced."""
        self._model, self._tables, self._sampler, self._images = model, tables, sampler, images
        self._dtype, self._device = dtype, tables.last_tokens.device
        self._in_group, self._repeatable = in_group, repeatable
        self._residual = torch.zeros(max_tokens, model.stream_size, dtype=dtype, device=self._device)
        vision, tower = model.config.vision, model.vision
        self._captured_features: Tensor | None = None
        """[tokens, width]: where captured steps read image features; None if steps with images are not captured."""
        # A graph cannot depend on the number of image tokens, as image-specific weights in the layers do.
        if tower is not None and (vision is None or vision.image_rows is None):
            self._captured_features = torch.cat([self._residual] * (1 + tower.num_deep), 1)

    def compute_residual(self, size: MixedSize, *, adapted: bool = False) -> None:
        """Compute all layers but the last of a step with prompt tokens. Captured."""
        inputs = self._tables.mixed_inputs(size, adapted=adapted)
        inputs.image_features = self._captured_features
        self._model.before_last(inputs, self._residual[: size.tokens])

    def place_features(self, step: StepTensors) -> None:
        """Copy the image features of an uploaded step to where `compute_residual` reads them."""
        features, room = step.inputs.image_features, self._captured_features
        if features is not None and room is not None:
            room[: len(features), : features.shape[1]].copy_(features)

    def upload(self, batch: Batch, pending: PendingStep, *, captured: bool) -> StepTensors:
        """Upload a step with at least one row, and launch the encoding of its images. `captured`: let its residual
        stream be computed by a graph, if one holds it."""
        features = self._features(batch, pending)
        joint = () if features is None else joint_tokens(batch)
        captured = captured and not self._is_whole(batch) and not joint
        captured = captured and (features is None or self._captured_features is not None)
        step = self._tables.advance(batch, captured=captured)
        step.inputs.image_features = features
        step.inputs.num_image_tokens = None if features is None else len(features)
        step.inputs.joint = joint
        return step

    def _is_whole(self, batch: Batch) -> bool:
        """Return whether all tokens go through the last layer, because some results need them there."""
        return self._model.config.num_layers < 2 or any(row.reads_all for row in batch.prefill)

    def _features(self, batch: Batch, pending: PendingStep) -> Tensor | None:
        """Return the features of the step's image tokens [F, hidden]; None for a step without images.

        If memory runs out, the rows with images fail, and their features are zeros.
        """
        if self._images is None:
            return None
        try:
            return self._images.of_step(batch)
        except torch.OutOfMemoryError:
            if self._in_group:
                raise
        torch.cuda.empty_cache()
        self._images.clear()
        counts = self._images.counts(batch)
        pending.failed |= dict.fromkeys(counts, OUT_OF_MEMORY)
        return torch.zeros(sum(counts.values()), self._model.config.hidden_size, dtype=self._dtype, device=self._device)

    def forward(self, step: StepTensors, pending: PendingStep) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the tokens of `step.sampled` [R + L, H], and of all tokens [T, H]. The latter are
        taken before the last layer, or after it if all tokens go through it. If the step has a size, a graph has
        computed the residual stream before the last layer.

        If memory runs out, the prompt tokens are computed in two halves. If that fails too, the prefill rows fail and
        the decode rows continue.
        """
        try:
            if step.sampled is not None and not self._is_whole(pending.batch):
                if step.size is None:
                    residual = self._model.before_last(step.inputs)
                else:
                    residual = self._residual[: step.size.tokens]
                return self._model.last_hidden(residual, step.inputs, step.sampled), residual
            hidden: Tensor = self._model(step.inputs)
            return _sampled_hidden(hidden, step), hidden
        except torch.OutOfMemoryError:
            num_decode = step.arrays.num_decode
            if not self._repeatable or num_decode == len(step.arrays.row_slots):
                raise
        torch.cuda.empty_cache()
        hidden, complete = compute_in_parts(self._model, step, self._dtype)
        if not complete:
            pending.failed = {row.slot: OUT_OF_MEMORY for row in pending.batch.prefill}
        return _sampled_hidden(hidden, step), hidden

    def launch_extras(self, step: StepTensors, pending: PendingStep, hidden: Tensor, stream: Tensor) -> None:
        """Launch scores and pooling of prefill rows, from the hidden states that `forward` returns."""
        batch, rows = pending.batch, step.arrays.rows
        for row, first in zip(batch.prefill, rows.prefill_starts, strict=True):
            if row.scored and row.slot not in pending.failed:
                tokens = stream[first : first + len(row.tokens)]
                self._launch_extra(pending, [row], partial(PromptScores, row, tokens, self._model, self._sampler.ranks))
        pooled = [row for row in batch.prefill if row.pooling is not None]
        if pooled:
            self._launch_extra(pending, pooled, partial(PooledHidden, batch, rows, stream, hidden, self._model.score))

    def _launch_extra(
        self, pending: PendingStep, rows: Sequence[PrefillRow], launch: Callable[[], PromptScores | PooledHidden]
    ) -> None:
        """Launch scores or pooling of prefill rows. If memory runs out, these rows fail."""
        try:
            pending.extras.append(launch())
        except torch.OutOfMemoryError:
            if self._in_group:
                raise
            pending.failed |= dict.fromkeys((row.slot for row in rows), OUT_OF_MEMORY)

    def draw(self, step: StepTensors, logits: Tensor, pending: PendingStep) -> Tensor:
        """Launch the sampling of the step's tokens, from the rank's logits [R, V]. Return tokens and flags [2, R]
        int32."""
        rows, count = step.arrays.rows, len(step.arrays.rows.slots)
        results = torch.empty(2, count, dtype=torch.int32, device=self._device)
        if not count:
            return results
        largest = self._sampler.largest(logits, rows.slots)
        if largest is not None:
            self._tables.last_tokens.index_copy_(0, upload(rows.slots, self._device), largest)
            results[0], results[1] = largest, 0
            return results
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        flags = torch.empty(count, dtype=torch.int32, device=self._device)
        if self._sampler.takes_lists(rows.slots):
            self._sampler.draw_from_lists(logits, step.slots, step.positions, tokens, flags)
        else:
            row_logits = self._sampler.own_rows(logits)
            self._sampler.draw(row_logits, step.slots, step.positions, tokens, flags)
            self._sampler.edit_and_redraw(
                row_logits, rows.slots, rows.positions, step.slots, step.positions, tokens, flags
            )
            pending.logprobs = self._sampler.logprobs(row_logits, rows.slots, tokens)
        kernels.record_tokens(tokens, flags, step.slots, self._tables.last_tokens, results)
        return results


def _sampled_hidden(hidden: Tensor, step: StepTensors) -> Tensor:
    """Return the rows of `hidden` [T, H] that are sampled from or pooled: [R + L, H]."""
    return hidden if step.sampled is None else kernels.gather_rows(hidden, step.sampled.indices)
