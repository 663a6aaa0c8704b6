"""Answers that are held to something, where the model runs in other processes: those of one process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncEngine, ChatTemplateConfig, GenerationConfig, UnsupportedFeature
from asyncllm.agent.executor import open_executor
from asyncllm.config.structured_output.response_format import GrammarSpec
from asyncllm.locate import locate
from asyncllm.ranks import messages
from asyncllm.ranks.grammars import RankGrammars
from asyncllm.text.grammars.bridge import CompiledGrammar, GrammarCompiler, GrammarStart, GrammarText
from asyncllm.text.tokenizer import Tokenizer
from tests.ranks.engines import ranks, settings

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

FOLDER = locate("tiny-chat")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TRIP: Any = {
    "type": "function",
    "function": {
        "name": "trip",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the shared engine."""
    return "asyncio", {"use_uvloop": True}


def engine_of(**fields: Any) -> AsyncEngine:
    config = settings(isolated=False, dtype="float32", tool_call_parser="hermes", session_len=512, **fields)
    return AsyncEngine("tiny-chat", config, chat_template_config=ChatTemplateConfig(chat_template=TEMPLATE))


@pytest.fixture(scope="module")
async def divided(anyio_backend: object) -> AsyncIterator[AsyncEngine]:
    async with engine_of(tp=2) as engine:
        yield engine
    assert ranks() == []


async def everything(engine: AsyncEngine) -> list[Any]:
    """Held and free rows in the same steps."""
    schema = {"type": "json_schema", "json_schema": {"schema": PERSON}}
    asked = [
        GenerationConfig(response_format=schema, temperature=1.1, top_k=0, random_seed=5, n=2, max_new_tokens=64),
        GenerationConfig(response_format=schema, temperature=0.0, repetition_penalty=1.2, max_new_tokens=64),
        GenerationConfig(response_format={"type": "choice", "choice": ["red", "blue"]}, random_seed=1, temperature=1.0),
        GenerationConfig(response_format={"type": "regex", "regex": "[a-c]{3,5}"}, random_seed=2, logprobs=1),
        GenerationConfig(temperature=0.0, max_new_tokens=12),
    ]
    tasks = [asyncio.create_task(engine.generate("Who are you?", config).response()) for config in asked]
    forced = engine.generate("Hi", GenerationConfig(max_new_tokens=64), tools=[TRIP], tool_choice="required")
    answers = [await task for task in tasks]
    for answer in (*answers[0].choices, answers[1]):
        assert set(json.loads(answer.text)) == {"name", "age"}
    assert answers[2].text in ("red", "blue")
    assert 3 <= len(answers[3].text) <= 5
    (call, *_) = (await forced).tool_calls
    assert call.name == "trip"
    assert json.loads(call.arguments) in ({"days": 1}, {"days": 2})
    return [[choice.token_ids for choice in answer.choices or (answer,)] for answer in answers]


async def test_answers_are_those_of_one_process(divided: AsyncEngine) -> None:
    async with engine_of() as engine:
        assert await everything(divided) == await everything(engine)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


async def test_a_rank_compiles_beside_its_steps_and_forgets_when_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = tokenizer.vocab_size
    grammars = RankGrammars()
    await grammars.open(FOLDER, size, tuple(tokenizer.eos_token_ids))
    compiled, go_on = GrammarCompiler.compile, threading.Event()

    def slowly(*args: Any, **named: Any) -> CompiledGrammar:
        go_on.wait(30)
        return compiled(*args, **named)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    taken = [
        grammars.take(GrammarText(number, GrammarSpec("regex", f"a{{{number + 1}}}"), False)) for number in range(2)
    ]
    grammars.forget([1])
    assert not any(future.done() for future in taken)
    go_on.set()
    await asyncio.gather(*taken)
    row = grammars.make(0, GrammarStart()).start([])
    words = np.zeros(-(-size // 32), np.int32)
    row.fill(words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert [tokenizer.decode([token]) for token in allowed.tolist()] == ["a"]
    grammars.forget([0])
    for number in range(2):
        with pytest.raises(KeyError):
            grammars.make(number, GrammarStart())
    assert not grammars._kept


async def test_a_text_is_sent_once_and_forgotten_with_its_grammar(
    divided: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    encoded = messages.encode

    def encode(message: Any) -> bytes:
        if isinstance(message, messages.TakeGrammar | messages.ForgetGrammars):
            told.append(message)  # and no steps, which hold their grammars
        return encoded(message)

    monkeypatch.setattr("asyncllm.ranks.executor.encode", encode)
    monkeypatch.setattr("asyncllm.engine.requests.grammars.MAX_KEPT", 1)
    for pattern in ("[ab]{3}", "[ab]{3}", "[cd]{3}", "[ef]{3}"):
        config = GenerationConfig(response_format={"type": "regex", "regex": pattern})
        assert len((await divided.generate("Hi", config)).text) == 3
    texts = [message.grammar for message in told if isinstance(message, messages.TakeGrammar)]
    assert [text.spec.source for text in texts] == ["[ab]{3}", "[cd]{3}", "[ef]{3}"]
    forgotten = {
        number for message in told if isinstance(message, messages.ForgetGrammars) for number in message.numbers
    }
    assert texts[0].number in forgotten
    assert texts[2].number not in forgotten


async def test_with_a_tokenizer_of_the_callers_it_is_refused(tokenizer: Tokenizer) -> None:
    """By an engine whose executor says that it is in other processes."""
    held = GenerationConfig(response_format={"type": "choice", "choice": ["red", "blue"]})
    executor: Any = open_executor(settings(), FOLDER)
    async with AsyncEngine("tiny-chat", executor=executor, tokenizer=tokenizer) as engine:
        assert (await engine.generate("Hi", held)).text in ("red", "blue")
    executor = open_executor(settings(), FOLDER)
    executor.isolated = True
    async with AsyncEngine("tiny-chat", executor=executor, tokenizer=tokenizer) as engine:
        assert not engine.limits.takes_grammars
        with pytest.raises(UnsupportedFeature, match="response_format"):
            await engine.generate("Hi", held)
