"""Answers a file of OpenAI batch requests, through a server that only this program can reach.

A line of the input is `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. Each
produces a line of the output, in the order in which they finish.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import aiohttp

from asyncllm.config import ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.server.app import build_app
from asyncllm.server.http.listening import bind, listening
from asyncllm.server.run import open_service

__all__ = ["ROUTES", "Count", "answer_file"]

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank")
"""Routes that a line may name."""

MAX_UNANSWERED = 512
"""Maximum number of unanswered requests, so that a long file is never in memory. It exceeds the rows of most engines,
so that none of them is free while a line is read."""


@dataclass
class Count:
    """Number of lines by outcome."""

    answered: int = 0
    refused: int = 0


@dataclass
class _Lines:
    """The requests of a file, shared by all tasks that send them."""

    source: TextIO
    number: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def next(self) -> tuple[int, str] | None:
        """Return the number and text of the next non-empty line; None after the last."""
        async with self.lock:
            while True:
                line = await asyncio.to_thread(self.source.readline)
                if not line:
                    return None
                self.number += 1
                if line.strip():
                    return self.number, line


async def answer_file(engine: AsyncEngine, source: TextIO, target: TextIO) -> Count:
    """Start the engine, answer each line of `source` with a line in `target`, and close the engine.

    Raises InvalidParameter, ModelError, and OSError or ValueError if a file cannot be read or written.
    """
    key = secrets.token_hex(32)
    config = ServerConfig(server_port=0, api_keys=[key], max_connections=2 * MAX_UNANSWERED, log_level="ERROR")
    service = await asyncio.to_thread(open_service, engine, config)
    listener = bind(service.config)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    count, lines = Count(), _Lines(source)
    with listener, _first_error():
        async with (
            listening(build_app(service), service.config, listener, None),
            service.supervisor,
            aiohttp.ClientSession(
                url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=MAX_UNANSWERED),
            ) as client,
            asyncio.TaskGroup() as senders,
        ):
            for _ in range(MAX_UNANSWERED):
                senders.create_task(_send(client, lines, target, count))
    return count


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise the first error of a group instead of the group: the others follow from it."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _send(client: aiohttp.ClientSession, lines: _Lines, target: TextIO, count: Count) -> None:
    while (line := await lines.next()) is not None:
        result = await _result(client, *line)
        answered = result["error"] is None and result["response"]["status_code"] == 200
        count.answered += answered
        count.refused += not answered
        await asyncio.to_thread(_write, target, result)


def _write(target: TextIO, result: dict[str, Any]) -> None:
    target.write(json.dumps(result, ensure_ascii=False) + "\n")
    target.flush()


async def _result(client: aiohttp.ClientSession, number: int, line: str) -> dict[str, Any]:
    """Return the output line for an input line."""
    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError):
        asked = None
    if isinstance(asked, dict):
        result["custom_id"] = asked.get("custom_id")
    fault = _fault(asked)
    if fault is not None:
        result["error"] = {"code": "invalid_line", "message": f"Line {number} is not sent: {fault}"}
        return result
    async with client.post(asked["url"], json=asked["body"]) as response:
        result["response"] = {
            "status_code": response.status,
            "request_id": response.headers.get("X-Request-Id", ""),
            "body": await response.json(content_type=None),
        }
    return result


def _fault(asked: Any) -> str | None:
    """Return why a line cannot be sent, or None."""
    if not isinstance(asked, dict):
        return "it is not a JSON object. One is {'custom_id': ..., 'method': 'POST', 'url': ..., 'body': {...}}."
    if not isinstance(asked.get("custom_id"), str):
        return "it has no custom_id, a text by which its answer is known."
    if unknown := asked.keys() - {"custom_id", "method", "url", "body"}:
        return f"it has {sorted(unknown)[0]!r}. Put options into its body."
    if asked.get("method", "POST") != "POST":
        return "its method is not POST."
    if asked.get("url") not in ROUTES:
        return f"its url is none of {', '.join(ROUTES)}."
    if not isinstance(asked.get("body"), dict):
        return "its body is not a JSON object."
    if asked["body"].get("stream"):
        return "it asks for a stream. Answers are written when they are whole: leave stream out."
    return None
