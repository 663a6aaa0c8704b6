"""FakeEngine and FakePipeline: the real engine with scripted answers, without a model and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import InvalidMessage, UnsupportedFeature
from asyncllm.pipeline import Pipeline
from asyncllm.testing.byte_tokenizer import ByteTokenizer
from asyncllm.testing.fake_executor import FakeExecutor
from asyncllm.testing.fault_plan import FaultPlan
from asyncllm.testing.oracles import script_oracle
from asyncllm.text.chat_template import ChatTemplate

__all__ = ["Answers", "FakeEngine", "FakePipeline", "FakeTemplate", "fake_parts"]

Answers = str | Mapping[str, str] | Callable[[str], str] | None
"""The scripted answers: one text for all, a mapping from the last user message, or a function of it. None repeats the
message, and so does a mapping without it."""

TURN = "\x02{role}\x1f{content}\x03"
"""A message in the fake chat template. The control characters delimit texts of any content."""


class _Renderer:
    """Writes checked messages so that they can be parsed again. Tools come first, as a message of their own."""

    variables: frozenset[str] = frozenset()
    source: str | None = "<tool_call>"
    """As in Qwen's templates. The format of calls is detected from it."""
    reads_tools = True

    def render(self, messages: list[dict[str, Any]], ending: str, variables: Mapping[str, Any]) -> str:
        if variables.keys() - {"tools"}:
            raise UnsupportedFeature("The fake chat template has no variables. Leave them out.", "chat_template_kwargs")
        tools = variables.get("tools")
        texts = [("tools", json.dumps(tools))] if tools else []
        texts += [(message["role"], _content_of(message)) for message in messages]
        text = "".join(TURN.format(role=role, content=content) for role, content in texts)
        if ending == "continued":
            return text.removesuffix(TURN[-1])
        return text + TURN.partition("{content}")[0].format(role="assistant") if ending == "answer" else text

    def later_turn(self, prompt: str) -> str:
        return self.render([{"role": "user", "content": prompt}], "answer", {})


def _content_of(message: dict[str, Any]) -> str:
    """Return a message's content followed by its calls, as a model with this template writes them.

    Raises InvalidMessage for malformed calls.
    """
    try:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        written = "".join(
            f'<tool_call>{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}</tool_call>'
            for function in functions
        )
        return f"{message['content'] or ''}{written}"
    except (KeyError, TypeError) as error:
        raise InvalidMessage("tool_calls are objects with a function, which has a name and arguments.") from error


class FakeTemplate(ChatTemplate):
    """A chat template whose prompts can be parsed again. It checks messages like any other."""

    def __init__(self) -> None:
        super().__init__("fake", _Renderer())

    @staticmethod
    def last_user_message(prompt: str) -> str:
        """Return the last user message of a rendered prompt. A prompt that was not rendered is the message itself."""
        _, found, rest = prompt.rpartition("\x02user\x1f")
        return rest.partition("\x03")[0] if found else prompt


def fake_parts(
    answers: Answers = None,
    *,
    config: EngineConfig | None = None,
    delay_per_token: float = 0.0,
    faults: FaultPlan | None = None,
    **device: Any,
) -> dict[str, Any]:
    """Return the `executor`, `tokenizer` and `chat_template` of a fake engine, and whatever else `faults` wraps. The
    adapters of `config` count as loaded. `device`: arguments of FakeExecutor."""
    tokenizer, template = ByteTokenizer(), FakeTemplate()

    def answer(prompt_ids: list[int]) -> list[int]:
        question = template.last_user_message(tokenizer.decode(prompt_ids))
        if isinstance(answers, str):
            text = answers
        elif isinstance(answers, Mapping):
            text = answers.get(question, question)
        else:
            text = answers(question) if answers is not None else question
        return tokenizer.encode(text, add_bos=False, parse_special=False)

    settings: dict[str, Any] = {
        "oracle": script_oracle(answer, tokenizer.eos_token_ids[0]),
        "num_blocks": 1024,
        "num_slots": 256,
    }
    if config is not None:
        adapters = range(1, len(config.adapters or ()) + 1)
        settings |= {"num_adapter_slots": config.num_adapter_slots, "adapters": adapters}
    if faults is not None:
        settings["wrap"] = faults.agent
    executor = FakeExecutor(**{**settings, "latency": delay_per_token, **device})
    if faults is not None:
        return faults.parts(executor, tokenizer, template)
    return {"executor": executor, "tokenizer": tokenizer, "chat_template": template}


class FakeEngine(AsyncEngine):
    """An AsyncEngine for testing programs that use one. Scheduling, streaming, sessions, cancellation and errors are
    real; only the tokens are scripted.

        async with FakeEngine({"ping": "pong"}) as llm:
            assert (await llm.generate("ping")).text == "pong"

    One token is one byte of UTF-8. FakeExecutor's `executor.pause()`, `fail_at` and `row_failure` delay or break it,
    and a FaultPlan breaks any part of it.
    """

    def __init__(
        self,
        answers: Answers = None,
        backend_config: EngineConfig | None = None,
        *,
        delay_per_token: float = 0.0,
        faults: FaultPlan | None = None,
        **device: Any,
    ) -> None:
        """`delay_per_token`: in seconds. `device`: arguments of FakeExecutor, such as num_blocks or fail_at."""
        parts = fake_parts(answers, config=backend_config, delay_per_token=delay_per_token, faults=faults, **device)
        self.executor: FakeExecutor = parts["executor"]
        super().__init__("fake", backend_config, **parts)


class FakePipeline(Pipeline):
    """FakeEngine's counterpart for testing synchronous programs."""

    def __init__(
        self,
        answers: Answers = None,
        backend_config: EngineConfig | None = None,
        *,
        delay_per_token: float = 0.0,
        **device: Any,
    ) -> None:
        parts = fake_parts(answers, config=backend_config, delay_per_token=delay_per_token, **device)
        self.executor: FakeExecutor = parts["executor"]
        super().__init__("fake", backend_config, **parts)
