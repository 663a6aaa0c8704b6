"""ContainedRunner: what a step raises ends that step, and not the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncllm.agent.thread_executor import StepRunner
from asyncllm.batch import Batch, Command, Limits, StepDropped, StepFailed, StepOutput

__all__ = ["BatchRunner", "ContainedRunner", "LostSteps"]


class BatchRunner(StepRunner[Batch, StepOutput], Protocol):
    """What runs the steps of a model in a thread, and commands between them: `ModelAgent`, or a fake."""

    def carry_out(self, command: Command, /) -> None:
        """Raises an AsyncLLMError if everything is as it was."""


class LostSteps:
    """Which steps must not run, because they were scheduled when nobody knew yet that one before them has failed.

    Such a step has rows whose slots were never started, or whose block tables and positions are those of a former
    owner: it would write where others read.
    """

    def __init__(self) -> None:
        self._newest = -1

    def add(self, batch: Batch) -> None:
        """This step has failed."""
        self._newest = batch.step

    def check(self, batch: Batch) -> None:
        """Raise StepDropped if this step is lost as well. To be called for all steps in order."""
        if batch.last_read < self._newest:
            failed, self._newest = self._newest, batch.step
            raise StepDropped(f"Step {batch.step} was not run: it was built on step {failed}, which gave nothing.")


class ContainedRunner:
    """A BatchRunner whose steps raise StepFailed, or StepDropped behind one that did, instead of what went wrong."""

    def __init__(self, runner: BatchRunner, survives: Callable[[Exception], bool] = lambda error: True) -> None:
        """`survives` says whether the runner is as good as before when a step has raised this; else it is passed on."""
        self._runner = runner
        self._survives = survives
        self._lost = LostSteps()

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    def step(self, batch: Batch) -> StepOutput:
        self._lost.check(batch)
        try:
            return self._runner.step(batch)
        except Exception as error:
            if not self._survives(error):
                raise
            self._lost.add(batch)
            raise StepFailed(f"Step {batch.step} failed.") from error

    def carry_out(self, command: Command) -> None:
        self._runner.carry_out(command)
