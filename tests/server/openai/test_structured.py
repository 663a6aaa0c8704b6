"""Structured answers as OpenAI's own client asks for them, and in the spellings of other servers."""

from __future__ import annotations

import json
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from asyncllm import AsyncEngine, EngineConfig
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<b"],
            "tags": [{"begin": "<b>", "content": {"type": "const_string", "value": "red"}, "end": "</b>"}],
            "at_least_one": True,
            "stop_after_first": True,
        },
    }
)


class Sum(BaseModel):
    sum: int
    sure: bool


def served_model() -> AbstractAsyncContextManager[Served]:
    """Return a server of the bundled model."""
    return serving(AsyncEngine("tiny-chat", EngineConfig(num_gpu_blocks=32, session_len=512)))


async def test_the_client_parses_what_it_asked_for() -> None:
    async with served_model() as served, served.openai() as client:
        asked: Any = {"model": "tiny-chat", "messages": QUESTION, "response_format": Sum, "temperature": 0.0}
        whole = await client.chat.completions.parse(**asked)
        assert isinstance(whole.choices[0].message.parsed, Sum)
        async with client.chat.completions.stream(**asked) as stream:
            await stream.until_done()
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == whole.choices[0].message.parsed


SPELLINGS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}, "max_tokens": 4}, re.compile(r"\{.*", re.DOTALL)),
    ({"response_format": {"type": "regex_schema", "regex_schema": "[a-c]{3}"}}, re.compile("[a-c]{3}")),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}, SCHEMA),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, re.compile("[a-c]{3}")),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, re.compile("red|blue")),
    ({"structured_outputs": {"json_object": True}, "max_tokens": 4}, re.compile(r"\{.*", re.DOTALL)),
    ({"guided_json": SCHEMA}, SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    ({"guided_regex": "[a-c]{3}"}, re.compile("[a-c]{3}")),
    ({"guided_choice": ["red", "blue"]}, re.compile("red|blue")),
    ({"guided_grammar": 'root ::= "red" | "blue"'}, re.compile("red|blue")),
    ({"json_schema": SCHEMA}, SCHEMA),
    ({"regex": "[a-c]{3}"}, re.compile("[a-c]{3}")),
    ({"ebnf": 'root ::= "red" | "blue"'}, re.compile("red|blue")),
    ({"grammar": 'start: "red" | "blue"'}, re.compile("red|blue")),
    ({"response_format": json.loads(TAG)}, re.compile("<b>red</b>")),
    ({"structured_outputs": {"structural_tag": TAG}}, re.compile("<b>red</b>")),
]


async def test_each_spelling_holds_the_answer() -> None:
    async with served_model() as served:
        for body, wanted in SPELLINGS:
            for path, prompt in (
                ("/v1/chat/completions", {"messages": QUESTION}),
                ("/v1/completions", {"prompt": "A sum:"}),
            ):
                status, found = await served.post(path, {"max_tokens": 60, **prompt, **body})
                assert status == 200, (body, found)
                choice = found["choices"][0]
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                if isinstance(wanted, dict):
                    jsonschema.validate(json.loads(text), wanted)
                else:
                    assert wanted.fullmatch(text), (body, text)


REFUSED: list[tuple[Any, str]] = [
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "x"}}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": TAG, "regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": 5}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "structures": [{}], "triggers": []}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
    ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}}, "structured_outputs"),
    ({"guided_json": {}, "guided_whitespace_pattern": "x*"}, "guided_json"),
    ({"guided_json": {}, "guided_whitespace_pattern": "( "}, "guided_json"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"json_schema": {"type": "integer", "maximum": 10**400}}, "json_schema"),
]


async def test_white_space_is_what_was_asked_for() -> None:
    pair = {"type": "object", "properties": {name: {"enum": [1, 2]} for name in "ab"}, "required": ["a", "b"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    nulls = {name: None for name in ("regex", "choice", "grammar", "json_object", "structural_tag")}
    compact: dict[str, Any] = {"json": pair, "disable_any_whitespace": True, "disable_fallback": False, **nulls}
    two = {"guided_json": pair, "guided_whitespace_pattern": " {2}"}
    async with served_model() as served:
        for body, wanted in (
            ({"structured_outputs": compact}, r'\{"a":[12],"b":[12]\}'),
            ({"structured_outputs": compact, "tools": [tool]}, r'\{"a":[12],"b":[12]\}|'),
            (two, r'\{(  )?"a"(  )?:(  )?[12](  )?,(  )?"b"(  )?:(  )?[12](  )?\}'),
        ):
            for seed in range(3):
                asked = {"messages": QUESTION, "seed": seed, "temperature": 2.0, "max_tokens": 60, **body}
                status, found = await served.post("/v1/chat/completions", asked)
                assert status == 200, found
                assert re.fullmatch(wanted, found["choices"][0]["message"]["content"] or ""), (body, found)


async def test_what_cannot_be_held_to_is_refused_by_name() -> None:
    async with served_model() as served:
        for body, param in REFUSED:
            status, found = await served.post("/v1/chat/completions", {"messages": QUESTION, **body})
            assert (status, found["error"]["param"]) == (400, param), body
            assert param == "response_format" or "response_format" not in found["error"]["message"] or len(body) > 1
        asked = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}
        status, found = await served.post("/v1/responses", asked)
        assert (status, found["error"]["param"]) == (400, "text.format")
