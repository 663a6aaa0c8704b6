"""Structured answers of the bundled model obey their schema, whatever other options a request has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidParameter, UnsupportedFeature
from asyncllm.agent.sampling import grammar_masks
from asyncllm.testing import FakeEngine
from tests.engine.waits import until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "union": {"anyOf": [{"const": 7}, {"type": "object", "properties": {"x": {"const": None}}, "required": ["x"],
              "additionalProperties": False}]},
    "date": {"type": "string", "format": "date"},
    "pattern": {"type": "string", "pattern": "^[a-f]{3}-[0-9]+$", "maxLength": 8},
    "reference": {"$defs": {"n": {"type": "integer", "minimum": 10, "maximum": 99}}, "type": "array",
                  "prefixItems": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/n"}], "items": False, "minItems": 2},
}  # fmt: skip
QUESTION = "What is 17 + 25?"


def held(schema: Any, **fields: Any) -> GenerationConfig:
    return GenerationConfig(response_format={"type": "json_schema", "json_schema": {"schema": schema}}, **fields)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(block_size=16, num_gpu_blocks=64, session_len=512, max_prefill_token_num=16)
    async with AsyncEngine("tiny-chat", config) as engine:
        yield engine
        engine.check_idle()


@pytest.mark.parametrize("name", SCHEMAS)
async def test_each_answer_is_valid(llm: AsyncEngine, name: str) -> None:
    configs = [
        held(SCHEMAS[name], temperature=1.2, top_k=0, random_seed=5, n=2),
        held(SCHEMAS[name], repetition_penalty=1.3),
    ]
    responses = await llm.batch_infer([QUESTION] * len(configs), configs)
    assert isinstance(responses, list)
    for response in responses:
        for answer in response.choices or (response,):
            assert answer.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.text), SCHEMAS[name])


async def test_seeds_batches_and_preemption_change_nothing() -> None:
    config = EngineConfig(block_size=16, num_gpu_blocks=14, session_len=192, max_prefill_token_num=16)
    async with AsyncEngine("tiny-chat", config) as llm:
        configs = [held(PERSON, temperature=1.0, top_k=0, random_seed=seed) for seed in range(4)]
        alone = [(await llm.generate(QUESTION, config)).token_ids for config in configs]
        # More than there is room for: some are preempted, and computed again from their tokens.
        long = GenerationConfig(max_new_tokens=100, ignore_eos=True)
        together = await asyncio.gather(*(llm.generate(QUESTION, config) for config in [long, *configs, long]))
        assert llm.stats().preemptions > 0
        assert [answer.token_ids for answer in together[1:-1]] == alone


async def test_masks_filled_by_several_cores_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(block_size=16, num_gpu_blocks=30, session_len=192, max_batch_size=16)
    configs = [held(PERSON, temperature=1.0, top_k=0, random_seed=seed) for seed in range(14)]
    plain = GenerationConfig(max_new_tokens=80, ignore_eos=True)
    answers: list[list[list[int]]] = []
    together_at: list[int] = []
    fill = grammar_masks.GrammarMasks._fill_together

    def counted(self: Any, progresses: list[Any], words: Any) -> None:
        together_at.append(len(answers))
        fill(self, progresses, words)

    monkeypatch.setattr(grammar_masks.GrammarMasks, "_fill_together", counted)
    for cores in (1, 3):
        monkeypatch.setattr(grammar_masks, "allowed_cores", lambda cores=cores: cores)
        async with AsyncEngine("tiny-chat", config) as llm:
            # The schema is compiled by then, so that all begin at once and cannot all stay.
            await llm.generate(QUESTION, held(PERSON, max_new_tokens=1))
            left = asyncio.ensure_future(llm.generate(QUESTION, held(PERSON, temperature=1.0, random_seed=77)))
            together = asyncio.gather(*(llm.generate(QUESTION, config) for config in [plain, *configs, plain]))
            await until(lambda: llm.stats().running > 8)
            left.cancel()
            answers.append([answer.token_ids for answer in await together])
            assert llm.stats().preemptions > 0
            llm.check_idle()
    assert answers[0] == answers[1]
    assert set(together_at) == {1}


async def test_others_are_not_touched(llm: AsyncEngine) -> None:
    plain = GenerationConfig(temperature=1.0, top_k=0, random_seed=3, max_new_tokens=40, ignore_eos=True)
    alone = (await llm.generate(QUESTION, plain)).token_ids
    beside, answer = await asyncio.gather(llm.generate(QUESTION, plain), llm.generate(QUESTION, held(PERSON)))
    assert beside.token_ids == alone
    jsonschema.validate(answer.parsed, PERSON)


async def test_an_answer_that_is_cut_is_a_beginning(llm: AsyncEngine) -> None:
    whole = await llm.generate(QUESTION, held(PERSON))
    cut = await llm.generate(QUESTION, held(PERSON, max_new_tokens=5))
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text)
    with pytest.raises(ValueError, match="truncated"):
        _ = cut.parsed


async def test_it_ends_where_the_end_may_not_come_yet(llm: AsyncEngine) -> None:
    for ignore_eos in (True, False):
        config = GenerationConfig(
            response_format={"type": "choice", "choice": ["yes"]}, min_new_tokens=9, ignore_eos=ignore_eos
        )
        answer = await llm.generate(QUESTION, config)
        assert (answer.text, answer.finish_reason) == ("yes", "stop")
        assert answer.generate_token_len < 9


async def test_stop_words_bad_words_and_logprobs(llm: AsyncEngine) -> None:
    answer = await llm.generate(QUESTION, held(PERSON, stop_words=["age"], logprobs=2))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "age")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    # Those of the model's own logits, among which a token that is not allowed may be the most likely one.
    assert all(value > float("-inf") for entry in answer.logprobs for value in entry.values())
    choice = GenerationConfig(response_format={"type": "choice", "choice": ["yes", "no"]}, bad_words=["yes", "y", "ye"])
    assert (await llm.generate(QUESTION, choice)).text == "no"


async def test_sessions_and_raw_prompts(llm: AsyncEngine) -> None:
    async with llm.session() as session:
        for _ in range(2):
            jsonschema.validate((await session.chat(QUESTION, held(PERSON))).parsed, PERSON)
    digits = {"type": "integer", "minimum": 10, "maximum": 99}
    assert 10 <= (await llm.generate("17 + 25 is", held(digits), do_preprocess=False)).parsed <= 99


class Point(msgspec.Struct):
    x: int
    y: bool


@dataclass
class Pair:
    left: bool
    right: None


async def test_classes_are_schemas_and_parse_answers(llm: AsyncEngine) -> None:
    form: Any = Pair
    answer = await llm.generate(QUESTION, GenerationConfig(response_format=form))
    assert isinstance(answer.parsed_as(Pair).left, bool)
    assert set(answer.parsed) == {"left", "right"}
    pairs: Any = Annotated[list[Pair], msgspec.Meta(max_length=2)]
    listed = await llm.generate(QUESTION, GenerationConfig(response_format=pairs))
    assert all(isinstance(pair.left, bool) for pair in listed.parsed_as(list[Pair]))
    point: Any = Point
    assert GenerationConfig(response_format=point).checked().is_constrained


async def test_bad_schemas_end_their_request_alone(llm: AsyncEngine) -> None:
    good = llm.generate(QUESTION, held(PERSON))
    bad = [llm.generate(QUESTION, held({"uniqueItems": True, "type": "array", "title": str(n)})) for n in range(5)]
    results = await asyncio.gather(good, *bad, return_exceptions=True)
    assert not isinstance(results[0], BaseException)
    assert all(isinstance(result, InvalidParameter) for result in results[1:])


async def test_equal_schemas_are_compiled_once(llm: AsyncEngine) -> None:
    schema = {"type": "boolean", "title": "once"}
    answers = await asyncio.gather(*(llm.generate(QUESTION, held(schema)) for _ in range(8)))
    assert {answer.text for answer in answers} <= {"true", "false"}
    grammars: Any = llm._lifecycle.inputs.grammars
    assert sum("once" in key[0].source for key in grammars._kept) == 1


async def test_many_grammars_are_not_all_kept(llm: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.engine.requests.grammars.MAX_KEPT", 3)
    for number in range(6):
        assert (await llm.generate(QUESTION, held({"const": number}))).text == str(number)
    grammars: Any = llm._lifecycle.inputs.grammars
    assert len(grammars._kept) == 3


async def test_a_fake_says_that_it_cannot() -> None:
    async with FakeEngine("Hi") as fake:
        with pytest.raises(UnsupportedFeature, match="fake"):
            await fake.generate("Hi", held(PERSON))
        assert (await fake.generate("Hi", GenerationConfig(response_format={"type": "text"}))).text == "Hi"
