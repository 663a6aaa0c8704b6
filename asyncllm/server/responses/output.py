"""Convert an answer to output items and their events. One item is open at a time."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Set
from typing import Any

from asyncllm.server.openai.answers import in_order
from asyncllm.server.request.custom_tools import InputText
from asyncllm.types import Chunk, Logprobs

__all__ = ["Event", "OutputItems"]

Event = tuple[str, dict[str, Any]]
"""Type of an event, and its fields except type and number."""

REASONING, MESSAGE, CALL, CUSTOM = "reasoning", "message", "function_call", "custom_tool_call"
PREFIXES = {REASONING: "rs_", MESSAGE: "msg_", CALL: "fc_", CUSTOM: "ctc_"}
TEXT_NAMES = {REASONING: "reasoning_text", MESSAGE: "output_text"}


class OutputItems:
    """The output items of one response, built from the chunks of its answer."""

    def __init__(
        self, scored: Callable[[Logprobs], list[Any]] | None = None, custom_names: Set[str] = frozenset()
    ) -> None:
        """`scored`: writes the log-probabilities of a message's tokens, if requested. `custom_names`: names of tools
        whose calls have a text instead of arguments."""
        self._scored = scored
        self._custom_names = custom_names
        self._input = InputText()
        """The text of the open call of a custom tool."""
        self._logprobs: list[Any] = []
        """Log-probabilities of the tokens of the open message."""
        self._num_reasoning = 0
        """Tokens of reasoning so far."""
        self._num_said = 0
        """Characters of messages so far."""
        self.items: list[dict[str, Any]] = []
        """The items as sent; the last one may be unfinished."""
        self._parts: list[str] = []
        """Pieces of the open item's text or arguments."""
        self._is_open = False

    def add(self, chunk: Chunk) -> Iterator[Event]:
        """Yield the events of a chunk."""
        if chunk.reasoning:
            yield from self._text(REASONING, chunk.reasoning)
        logprobs = self._logprobs_of(chunk)
        if logprobs:
            # Requests with log-probabilities have no tools.
            yield from self._text(MESSAGE, chunk.text, logprobs)
            return
        for part in in_order(chunk.text, self._num_said, chunk.tool_calls):
            if isinstance(part, str):
                yield from self._text(MESSAGE, part)
                continue
            if part.name is not None:
                yield from self._begin_call(part.id, part.name)
            if self.items[-1]["type"] == CUSTOM:
                yield from self._input_grows(self._input.read(part.arguments))
            elif part.arguments:
                self._parts.append(part.arguments)
                yield "response.function_call_arguments.delta", {**self._place(), "delta": part.arguments}
        self._num_said += len(chunk.text)

    def end(self, *, complete: bool) -> Iterator[Event]:
        """Yield the events that end the last item, which is truncated unless `complete`."""
        if not self.items:
            yield from self._begin_text(MESSAGE)
        yield from self._finish("completed" if complete else "incomplete")

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _logprobs_of(self, chunk: Chunk) -> list[Any]:
        """Return the log-probabilities of a chunk's tokens, without those of its reasoning, which come first."""
        new, self._num_reasoning = chunk.reasoning_token_len - self._num_reasoning, chunk.reasoning_token_len
        said = (chunk.logprobs or [])[new:]
        return [] if self._scored is None or not said else self._scored(said)

    def _text(self, kind: str, text: str, logprobs: list[Any] | None = None) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._begin_text(kind)
        self._parts.append(text)
        fields: dict[str, Any] = {**self._place(), "content_index": 0, "delta": text}
        if kind == MESSAGE:
            fields["logprobs"] = logprobs or []
            self._logprobs += fields["logprobs"]
        yield f"response.{TEXT_NAMES[kind]}.delta", fields

    def _begin_call(self, call_id: str | None, name: str) -> Iterator[Event]:
        is_custom = name in self._custom_names
        kind, empty = (CUSTOM, "input") if is_custom else (CALL, "arguments")
        yield from self._begin(kind, {empty: "", "call_id": call_id, "name": name})
        self._input = InputText()

    def _input_grows(self, delta: str) -> Iterator[Event]:
        if delta:
            yield "response.custom_tool_call_input.delta", {**self._place(), "delta": delta}

    def _begin_text(self, kind: str) -> Iterator[Event]:
        role: dict[str, Any] = {"role": "assistant"} if kind == MESSAGE else {"summary": []}
        yield from self._begin(kind, {**role, "content": []})
        part: dict[str, Any] = {"type": TEXT_NAMES[kind], "text": ""}
        if kind == MESSAGE:
            part |= {"annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield "response.content_part.added", {**self._place(), "content_index": 0, "part": dict(part)}

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._finish("completed")
        item = {"id": PREFIXES[kind] + uuid.uuid4().hex, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._is_open = True
        added = {**item, "content": []} if "content" in item else dict(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": added}

    def _finish(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, place = self.items[-1], self._place()
        item["status"] = status
        text, self._parts = "".join(self._parts), []
        if item["type"] == CUSTOM:
            yield from self._input_grows(self._input.rest())
            item["input"] = self._input.text
            yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
        elif item["type"] == CALL:
            item["arguments"] = text
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", done
        else:
            part = item["content"][0]
            part["text"] = text
            fields = {**place, "content_index": 0, "text": text}
            if item["type"] == MESSAGE:
                part["logprobs"], self._logprobs = self._logprobs, []
                fields["logprobs"] = part["logprobs"]
            yield f"response.{TEXT_NAMES[item['type']]}.done", fields
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}
