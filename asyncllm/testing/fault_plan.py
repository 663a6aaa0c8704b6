"""FaultPlan: deliberate faults at named points of an engine, injected by wrappers of its parts, never in its own code.

    plan = FaultPlan(Fault("decode", at=3), Fault("emit", request="poison"))
    async with FakeEngine("an answer", faults=plan) as llm: ...

    plan = FaultPlan()
    executor = open_executor(config, folder, wrap=plan.agent)
    async with AsyncEngine(model, config, **plan.parts(executor, tokenizer, chat_template)) as llm:
        plan.add(Fault("sample", "corrupt", probability=0.01, times=None))

`asyncllm.testing.faulty_parts` holds the wrappers that call `reach`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncllm.testing.faults import Faults

if TYPE_CHECKING:
    from asyncllm.agent.executor import Agent
    from asyncllm.protocol import Executor
    from asyncllm.text.chat_template import ChatTemplate
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["FaultPlan"]


class FaultPlan(Faults):
    """The faults of one engine, and the wrapped parts that inject them."""

    def agent(self, inner: Agent) -> Agent:
        """Wrap an agent with the faults of steps. Pass this as `wrap` to `open_executor` or FakeExecutor."""
        from asyncllm.testing.faulty_parts import faulty_agent

        return faulty_agent(inner, self)

    def parts(self, executor: Executor, tokenizer: Tokenizer, chat_template: ChatTemplate) -> dict[str, Any]:
        """Return arguments of AsyncEngine. `executor` must have been made with `wrap=plan.agent`."""
        from asyncllm.testing.faulty_parts import FaultyScheduler, FaultyTokenizer, faulty_template

        return {
            "executor": executor,
            "tokenizer": FaultyTokenizer(tokenizer, self),
            "chat_template": faulty_template(chat_template, self),
            "scheduler": partial(FaultyScheduler, self, tokenizer),
        }
