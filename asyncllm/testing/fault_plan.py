"""FaultPlan: faults on purpose, at named points of an engine, in the parts around it and never in its own code.

    plan = FaultPlan(Fault("decode", at=3), Fault("emit", request="poison"))
    async with FakeEngine("an answer", faults=plan) as llm: ...

    plan = FaultPlan()
    executor = open_executor(config, folder, wrap=plan.agent)
    async with AsyncEngine(model, config, **plan.parts(executor, tokenizer, chat_template)) as llm:
        plan.add(Fault("sample", "corrupt", probability=0.01, times=None))

`asyncllm.testing.faulty_parts` holds the wrappers that call `reach`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from asyncllm.agent.executor import Agent
    from asyncllm.batch import Executor
    from asyncllm.text.chat_template import ChatTemplate
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Action", "Fault", "FaultPlan", "InjectedFault", "Point"]

Point = Literal[
    "tokenize", "template", "admit", "alloc", "prefill", "decode", "sample", "detokenize", "emit", "swap", "free"
]
"""Where: encoding and rendering a prompt; giving a sequence its row, a sequence blocks; a step with prompt rows, with
decode rows, its choice of tokens; turning tokens into text, handing a chunk over; a step's copies between device and
host; giving blocks back."""

Action = Literal["raise", "sleep", "corrupt"]

CORRUPTIBLE = ("tokenize", "prefill", "decode", "sample")
"""Ids outside the vocabulary, rows whose numbers are not finite (prefill, decode), a sampled id outside the vocabulary.
What else could be wrong nobody would notice."""


class InjectedFault(Exception):
    """What a fault raises unless it is given an error of its own."""


class Fault:
    """One fault, and how often it has come about."""

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
        """From the how-manieth time (`at`, from 0) that the point is reached, and `times` times; None: without end.

        `probability` of each time, by the plan's seed. `request`: only for prompts that hold this text, in a step only
        if it has such a row. `seconds` that "sleep" takes. `error` that "raise" raises. Raises ValueError for a fault
        that cannot be.
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
        """Times that its point was reached by its request."""
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


class FaultPlan:
    """The faults of one engine. Written by whoever adds some; the parts only count, each in its own thread."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.faults = list(faults)
        self._dice = Random(seed)
        self.rows: dict[int, dict[int, str]] = {}
        """Step -> slot -> the prompt of its row. Written by the scheduler's wrapper, read by the agent's."""

    def add(self, fault: Fault) -> Fault:
        """Let this come about too, from now on."""
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """No more faults."""
        self.faults.clear()

    def reach(self, point: Point, prompts: Sequence[str] = ()) -> int | None:
        """A part is at this point, for requests with these prompts: raise or sleep if that is planned.

        Returns the index of the prompt whose result is to be corrupted; None: none.
        """
        corrupted: int | None = None
        for fault in self.faults:
            if fault.point != point:
                continue
            found = [index for index, prompt in enumerate(prompts) if fault.request is None or fault.request in prompt]
            if (fault.request is not None and not found) or not fault._fires(self._dice):
                continue
            if fault.action == "raise":
                raise fault.error or InjectedFault(f"a fault at {point}, as it was planned")
            if fault.action == "sleep":
                _take(fault.seconds)
            elif found:
                corrupted = found[0]
        return corrupted

    def agent(self, inner: Agent) -> Agent:
        """What runs or launches steps, with the faults of steps: `wrap` of `open_executor` and of FakeExecutor."""
        from asyncllm.testing.faulty_parts import faulty_agent

        return faulty_agent(inner, self)

    def parts(self, executor: Executor, tokenizer: Tokenizer, chat_template: ChatTemplate) -> dict[str, Any]:
        """Arguments of AsyncEngine. `executor` was made with `wrap=plan.agent`."""
        from asyncllm.testing.faulty_parts import FaultyScheduler, FaultyTokenizer, faulty_template

        return {
            "executor": executor,
            "tokenizer": FaultyTokenizer(tokenizer, self),
            "chat_template": faulty_template(chat_template, self),
            "scheduler": partial(FaultyScheduler, self, tokenizer),
        }


def _take(seconds: float) -> None:
    """Take that long, as a computation would: in the event loop's thread without a call that may be known to block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
