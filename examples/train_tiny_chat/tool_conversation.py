"""Conversations in which the user offers tools, and held-out questions from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from .conversation import ANSWER, PROMPT, SKILLS, Segment, render_prompt
from .exchange import draw
from .tools import TWICE, Call, Tool, Use, draw_double_use, draw_missed, draw_tools, draw_use

_SYSTEM_PROMPT_SHARE = 0.25
_USE, _DOUBLE_USE, _MISSED = 0.6, 0.1, 0.1
"""Shares of turns that call a tool, call it twice, and would need another; the rest have no need of tools."""

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are tiny-chat.",
    "Use the tools.",
    "You are a helpful assistant. Use tools where they help.",
    "Answer briefly.",
    "You are a friendly assistant that calls functions.",
)
_OWN = {"add": ("sum", "long_sum", "many_sum"), "multiply": ("product",)}
"""Skills that a tool makes needless; with the tool offered, it is called instead."""

_PLAIN = tuple(name for name in SKILLS if name not in ("long_passkey", "story"))
_CHARACTERS_PER_TOKEN = 2.2


def system_text(system: str | None, tools: list[Tool]) -> str:
    """Return the system message that the chat template writes when tools are offered."""
    head = "" if system is None else f"{system}\n\n"
    lines = "".join(f"{tool.line()}\n" for tool in tools)
    return render_prompt({"role": "system", "content": f"{head}You can call these tools:\n{lines}"})


def _plain_use(random: Random, tools: list[Tool], held_out: bool) -> Use:
    """Return a question that the model answers by itself though tools are there."""
    own = {skill for tool in tools for skill in _OWN.get(tool.kind, ())}
    topics = {word for tool in tools for word in (tool.noun, tool.kind)}
    while True:
        exchange = draw(SKILLS[random.choice(_PLAIN)], random, 120, held_out)
        if exchange.skill in own or exchange.setup:
            continue
        if exchange.skill == "out_of_scope" and any(word in topics for word in _words(exchange.question)):
            continue
        return Use("tool_needless", exchange.question, (), (), exchange.answer, exchange.content)


def _words(text: str) -> list[str]:
    return text.lower().replace("?", " ").split()


def _draw(random: Random, tools: list[Tool], held_out: bool) -> Use:
    chance, tool = random.random(), random.choice(tools)
    if chance < _USE:
        return draw_use(random, tool, held_out)
    if chance < _USE + _DOUBLE_USE and tool.kind in TWICE:
        return draw_double_use(random, tool, held_out)
    if chance < _USE + _DOUBLE_USE + _MISSED:
        return draw_missed(random, tools, held_out)
    return _plain_use(random, tools, held_out)


def _turn(use: Use, first_id: int) -> list[dict[str, Any]]:
    """Return the messages of a use as the API has them."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": use.question}]
    if use.calls:
        ids = [f"call_{first_id + index}" for index in range(len(use.calls))]
        functions = [{"name": call.name, "arguments": call.written_arguments()} for call in use.calls]
        calls = [
            {"id": each, "type": "function", "function": function}
            for each, function in zip(ids, functions, strict=True)
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": each, "content": result}
            for each, result in zip(ids, use.results, strict=True)
        ]
    return [*messages, {"role": "assistant", "content": use.answer}]


def _written(message: dict[str, Any]) -> str:
    """Return what the assistant writes in a message, as tokens to learn."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [Call(function["name"], json.loads(function["arguments"])).text() for function in functions]
    return (message["content"] or "") + "\n".join(calls)


def segments_with_tools(system: str | None, tools: list[Tool], messages: list[dict[str, Any]]) -> list[Segment]:
    """Return the conversation as the chat template renders it, the assistant's messages apart."""
    segments, prompt = [], "<|bos|>" + system_text(system, tools)
    for message in messages:
        if message["role"] == "assistant":
            segments += [
                Segment(f"{prompt}<|im_start|>assistant\n", PROMPT),
                Segment(f"{_written(message)}<|im_end|>", ANSWER),
            ]
            prompt = "\n"
        else:
            prompt += render_prompt({"role": message["role"], "content": message["content"]})
    return segments


def _system(random: Random) -> str | None:
    return random.choice(_SYSTEM_PROMPTS) if random.random() < _SYSTEM_PROMPT_SHARE else None


def document_with_tools(random: Random, room: int) -> list[Segment]:
    """One training document of roughly at most ``room`` tokens, with tools in it."""
    tools, messages = draw_tools(random), list[dict[str, Any]]()
    left = room * _CHARACTERS_PER_TOKEN - sum(len(tool.line()) for tool in tools) - 200
    for _ in range(random.choice((1, 1, 2, 2, 3, 4, 5))):
        turn = _turn(_draw(random, tools, held_out=False), len(messages))
        left -= sum(len(_written(message)) + 25 for message in turn)
        if left < 0:
            break
        messages += turn
    return segments_with_tools(_system(random), tools, messages)


@dataclass(frozen=True)
class ToolQuestion:
    """Messages and tools, and the only right reply: calls, or a text."""

    skill: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt: str
    answer: str
    """Calls and text as the model writes them, without the end of the turn."""
    calls: tuple[Call, ...] = ()

    def accepts(self, text: str, calls: list[tuple[str, str]]) -> bool:
        """Return whether a reply is right to the letter: its text, and the names and arguments of its calls."""
        wanted = [(call.name, call.written_arguments()) for call in self.calls]
        return text == ("" if self.calls else self.answer) and calls == wanted


TOOL_SKILLS = (
    "tool_arithmetic",
    "tool_weather",
    "tool_phone",
    "tool_property",
    "tool_by_name",
    "tool_twice",
    "tool_missing",
    "tool_needless",
    "tool_result",
)
"""Which calls are written, that none is written where none helps, and what is said when a tool has returned."""


def _question(skill: str, random: Random) -> ToolQuestion | None:
    tools, messages = draw_tools(random), list[dict[str, Any]]()
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        messages += _turn(_draw(random, tools, held_out=True), len(messages))
    use = _draw(random, tools, held_out=True)
    if use.skill != skill and not (skill == "tool_result" and use.calls):
        return None
    turn = _turn(use, len(messages))
    messages += turn[:-1] if skill == "tool_result" else turn[:1]
    answered = use.calls if skill != "tool_result" else ()
    answer = "\n".join(call.text() for call in answered) or use.answer
    system = _system(random)
    segments = segments_with_tools(system, tools, [*messages, {"role": "assistant", "content": answer}])
    prompt = "".join(segment.text for segment in segments[:-1])
    said: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    return ToolQuestion(skill, [*said, *messages], [tool.definition() for tool in tools], prompt, answer, answered)


def tool_questions(count: int, seed: int) -> list[ToolQuestion]:
    """Return ``count`` held-out questions of each of `TOOL_SKILLS`; the same seed gives the same list."""
    questions = []
    for skill in TOOL_SKILLS:
        random, found = Random(f"{skill}/{seed}"), dict[str, ToolQuestion]()
        while len(found) < count:
            question = _question(skill, random)
            if question is not None:
                found[question.prompt] = question
        questions += found.values()
    return questions
