"""PendingStep: a step on its way through the device, until its results are on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.device_sampler import DeviceSampler, PendingLogprobs
from asyncllm.agent.lost_device import abandon
from asyncllm.agent.pooled_hidden import PooledHidden
from asyncllm.agent.prompt_scores import PromptScores
from asyncllm.agent.sampler import NOT_FINITE
from asyncllm.agent.transfers import Transfers
from asyncllm.batch import Batch, StepOutput

__all__ = ["PendingStep"]


class PendingStep:
    """A launched step. `wait` blocks until its results are on the host; after that `output` reads them."""

    def __init__(
        self, batch: Batch, sampler: DeviceSampler, *, on_gpu: bool, on_read: Callable[[PendingStep], None]
    ) -> None:
        """`on_read` is called when its output is read."""
        self.batch = batch
        self.slots: NDArray[np.int64] = np.zeros(0, np.int64)
        """Slots that are sampled from, in batch order."""
        self.extras: list[PromptScores | PooledHidden] = []
        """What prefill rows ask for besides a token."""
        self.logprobs: PendingLogprobs | None = None
        self.failed: dict[int, str] = {}
        """Slot -> why it failed, if that was known at launch."""
        self.launched = False
        """Whether all of it is launched, so that `wait` comes to an end."""
        self._sampler = sampler
        self._on_read = on_read
        self._downloaded: list[Tensor] = []
        """What the download reads: held so that its memory is not lent again before."""
        self._results: list[Tensor] = []
        self._arrival: torch.cuda.Event | None = None
        self._began = _timing_event() if on_gpu else None
        self._ended = _timing_event() if on_gpu else None
        if self._began is not None:
            self._began.record()

    def download(self, transfers: Transfers, results: list[Tensor]) -> None:
        """Bring `results` to the host: [2, R] int32 tokens and flags, then the prefill rows' flags [P]."""
        self.launched = True
        if self._ended is not None:
            self._ended.record()
        self._downloaded = results
        self._results, self._arrival = transfers.download(results)

    def wait(self) -> None:
        """Block this thread, and no other, until the step is over. Raises what a lost device reports."""
        if self._arrival is None:
            return
        try:
            self._arrival.synchronize()
        except RuntimeError:
            # And with it, by `_on_read`, the agent and all steps in flight.
            abandon(self)
            raise

    @torch.inference_mode()
    def output(self) -> StepOutput:
        """The results, after `wait`. Called once, in the thread that launches steps."""
        self._on_read(self)
        batch, sampler = self.batch, self._sampler
        output = StepOutput(step=batch.step, slots=[], tokens=[])
        if self._results:
            sampled, unsound = (results.numpy() for results in self._results)
            # Rows beyond the batch are padding.
            tokens, flags = sampled[:, : len(self.slots)]
            output.slots, output.tokens = self.slots.tolist(), tokens.tolist()
            output.errors = sampler.errors(self.slots, flags)
            for row in np.flatnonzero(unsound[: len(batch.prefill)]).tolist():
                output.errors[batch.prefill[row].slot] = NOT_FINITE
            sampler.observe(self.slots, tokens)
            for extra in self.extras:
                extra.write(output)
            output.errors |= self.failed
            if self.logprobs is not None:
                output.logprobs = self.logprobs.result(output.errors)
        if self._began is not None and self._ended is not None and self._results:
            output.elapsed_ms = self._began.elapsed_time(self._ended)
        return output


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
