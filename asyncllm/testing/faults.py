"""Deliberate faults: the faults that can be planned, and the points of an engine at which they occur."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Literal, get_args

__all__ = ["Action", "Fault", "Faults", "InjectedFault", "Point"]

Point = Literal[
    "tokenize", "template", "admit", "alloc", "prefill", "decode", "sample", "detokenize", "emit", "swap", "free"
]
"""Encoding and rendering a prompt; giving a sequence its row, giving it blocks; a step with prompt rows, with decode
rows, its sampling; detokenizing, delivering a chunk; a step's copies between device and host; freeing blocks."""

Action = Literal["raise", "sleep", "corrupt"]

CORRUPTIBLE = ("tokenize", "prefill", "decode", "sample")
"""Points whose results can be corrupted: ids outside the vocabulary (tokenize), rows with non-finite numbers (prefill,
decode), a sampled id outside the vocabulary (sample). Other corruptions would go unnoticed."""


class InjectedFault(Exception):
    """The error that a fault raises by default."""


class Fault:
    """One fault, and the number of times it has occurred."""

    def __init__(
        self,
        point: Point,
        action: Action = "raise",
        *,
        at: int = 0,
        times: int | None = 1,
        probability: float = 1.0,
        request: str | None = None,
        seconds: float = 0.01,
        error: Exception | None = None,
    ) -> None:
        """Plan the fault for `times` occurrences (None: unlimited), starting when the point is reached for the `at`-th
        time, counted from 0.

        `probability` of each occurrence, drawn with the plan's seed. `request`: only for prompts that contain this
        text; in a step, only if it has such a row. `seconds`: the duration of "sleep". `error`: the exception of
        "raise". Raises ValueError for an impossible fault.
        """
        if point not in get_args(Point) or action not in get_args(Action):
            raise ValueError(f"There is no fault {action!r} at {point!r}. See Point and Action.")
        if action == "corrupt" and point not in CORRUPTIBLE:
            raise ValueError(f"Nothing can be corrupted at {point!r}, only at {', '.join(CORRUPTIBLE)}.")
        self.point = point
        self.action = action
        self.at = at
        self.times = times
        self.probability = probability
        self.request = request
        self.seconds = seconds
        self.error = error
        self.num_reached = 0
        """Times that its point was reached by a matching request."""
        self.num_fired = 0

    def _fires(self, dice: Random) -> bool:
        self.num_reached += 1
        if self.num_reached <= self.at or (self.times is not None and self.num_fired >= self.times):
            return False
        if self.probability < 1 and dice.random() >= self.probability:
            return False
        self.num_fired += 1
        return True

    def __repr__(self) -> str:
        return f"<Fault {self.action} at {self.point}, {self.num_fired} of {self.num_reached} times>"


class Faults:
    """The faults of one engine. `add` changes them; the parts only count, each in its own thread."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.faults = list(faults)
        self._dice = Random(seed)
        self.rows: dict[int, dict[int, str]] = {}
        """Step -> slot -> the prompt of its row. Written by the scheduler's wrapper, read by the agent's."""

    def add(self, fault: Fault) -> Fault:
        """Plan a fault from now on, and return it."""
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults."""
        self.faults.clear()

    def reach(self, point: Point, prompts: Sequence[str] = ()) -> int | None:
        """Raise or sleep if a fault is planned for this point and requests with these prompts.

        Returns the index of the prompt whose result is to be corrupted, or None.
        """
        corrupted: int | None = None
        for fault in self.faults:
            if fault.point != point:
                continue
            found = [index for index, prompt in enumerate(prompts) if fault.request is None or fault.request in prompt]
            if (fault.request is not None and not found) or not fault._fires(self._dice):
                continue
            if fault.action == "raise":
                raise fault.error or InjectedFault(f"a planned fault at {point}")
            if fault.action == "sleep":
                _take(fault.seconds)
            elif found:
                corrupted = found[0]
        return corrupted


def _take(seconds: float) -> None:
    """Take as long as a computation of `seconds`. In the event loop's thread, spin in Python, since a blocking call
    would be detected there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
