"""PendingStep: a launched step whose results have not been read on the host yet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.device.streams import Arrival, StepClock, Streams
from asyncllm.agent.prompt_outputs import PooledHidden, PromptScores
from asyncllm.agent.sampling.logprobs import PendingLogprobs
from asyncllm.agent.sampling.params import NOT_FINITE
from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.protocol import Batch, StepOutput

__all__ = ["PendingStep", "abandon"]


class PendingStep:
    """A launched step. `wait` blocks until its results are on the host; then `output` reads them."""

    def __init__(
        self, batch: Batch, sampler: Sampler, streams: Streams, *, on_read: Callable[[PendingStep], None]
    ) -> None:
        """`on_read` is called when the output is read."""
        self.batch = batch
        self.slots: NDArray[np.int64] = np.zeros(0, np.int64)
        """Slots that are sampled from, in batch order."""
        self.extras: list[PromptScores | PooledHidden] = []
        """Scores and pooled hidden states of prefill rows."""
        self.logprobs: PendingLogprobs | None = None
        self.failed: dict[int, str] = {}
        """Slot -> why its row failed at launch."""
        self.launched = False
        """Whether the whole step is launched, so that `wait` can return."""
        self._sampler = sampler
        self._streams = streams
        self._on_read = on_read
        self._downloaded: list[Tensor] = []
        """Tensors that the download reads, kept so that their memory is not reused earlier."""
        self._results: list[Tensor] = []
        self._arrival: Arrival | None = None
        self._clock: StepClock = streams.clock()

    def download(self, results: list[Tensor]) -> None:
        """Copy `results` to the host: [2, R] int32 tokens and flags, then the prefill rows' flags [P]."""
        self.launched = True
        self._clock.stop()
        self._downloaded = results
        self._results, self._arrival = self._streams.download(results)

    def wait(self) -> None:
        """Block this thread until the step is done. Raises RuntimeError if the device is lost."""
        if self._arrival is None:
            return
        try:
            self._arrival.synchronize()
        except RuntimeError:
            # Through `_on_read`, this also keeps the agent and all steps in flight.
            abandon(self)
            raise

    def output(self) -> StepOutput:
        """Return the results. Call it once, after `wait`, in the thread that launches steps."""
        self._on_read(self)
        batch, sampler = self.batch, self._sampler
        output = StepOutput(step=batch.step, slots=[], tokens=[])
        if self._results:
            sampled, unsound = (results.numpy() for results in self._results)
            # Rows beyond the batch are padding.
            tokens, flags = sampled[:, : len(self.slots)]
            output.slots, output.tokens = self.slots.tolist(), tokens.tolist()
            output.errors = sampler.errors(self.slots, flags)
            if batch.prefill:
                self._add_prefill(output, unsound)
            output.forced = sampler.observe(output.slots, output.tokens, batch.min_forced)
            output.errors |= self.failed
            if self.logprobs is not None:
                output.logprobs = self.logprobs.result(output.errors)
            output.elapsed_ms = self._clock.elapsed_ms()
        return output

    @torch.inference_mode()
    def _add_prefill(self, output: StepOutput, unsound: NDArray[np.int32]) -> None:
        """Add the results of the prefill rows, and errors for those that are `unsound` [P]."""
        for row, found in zip(self.batch.prefill, unsound.tolist(), strict=False):
            if found:
                output.errors[row.slot] = NOT_FINITE
        for extra in self.extras:
            extra.write(output)


def abandon(owner: object) -> None:
    """Never free `owner` and what it refers to, even at interpreter exit: it holds memory of a lost device.

    When pinned memory is freed, torch records an event on every stream that used it. On a lost device this raises in a
    destructor, which ends the process, and with it everything else that the process serves.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
