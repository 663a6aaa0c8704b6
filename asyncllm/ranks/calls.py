"""What the ranks of an executor have been asked and not all have answered: a step, or a call beside the steps."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from asyncllm.agent.step_thread import set_exception, set_result
from asyncllm.protocol import OtherRankRefused, StepOutput
from asyncllm.ranks.messages import Failure

__all__ = ["RankCall", "RankStep"]

_Result = TypeVar("_Result")


class RankStep:
    """A step that at least one rank has not answered."""

    __slots__ = ("answered", "error", "future", "waits_for")

    def __init__(self, future: asyncio.Future[StepOutput], num_ranks: int) -> None:
        self.future = future
        self.waits_for = num_ranks
        self.answered = False
        self.error: Exception | None = None
        """How it ended for the ranks that have answered."""


class RankCall(Generic[_Result]):
    """A command, an adapter or a grammar that at least one rank has not answered."""

    def __init__(self, future: asyncio.Future[_Result], num_ranks: int) -> None:
        self.future = future
        self.waits_for = num_ranks
        self.failures: list[Exception] = []
        self.results: set[_Result] = set()
        """The distinct results of the ranks that return one."""

    def answered(self, failure: Failure | None) -> bool:
        """Record how the call ended for a rank. Return whether that was the last one."""
        self.waits_for -= 1
        if failure is not None:
            self.failures.append(failure.error())
        return not self.waits_for

    def settle(self, result: _Result) -> None:
        """Give the future its result, or the first failure. All ranks have answered."""
        if self.failures:
            set_exception(self.future, self.failures[0])
        else:
            set_result(self.future, result)

    def cause(self) -> Exception:
        """Return the failure from which the others may have followed."""
        return next((error for error in self.failures if not isinstance(error, OtherRankRefused)), self.failures[0])
