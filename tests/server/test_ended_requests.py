"""No HTTP request that has ended waits for the garbage collector, however it ended."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest
from aiohttp import web

from asyncllm.testing import FakeEngine
from tests.cycles import alive, no_cycles
from tests.server.serving import Served, serving

LONG = "x" * 40_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]

BODIES: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "stream": (CHAT, {"messages": MESSAGES, "stream": True, "n": 2}),
    "completions": (COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "logprobs": 1}),
    "generate": ("/generate", {"prompt": "a"}),
    "interactive": ("/v1/chat/interactive", {"prompt": "a"}),
    "turn": ("/v1/chat/interactive", {"prompt": "a", "session_id": 1, "interactive_mode": True}),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}),
    "tokenize": ("/tokenize", {"prompt": "a"}),
    "perplexity": ("/get_ppl", {"input": "ab"}),
    "encode": ("/v1/encode", {"input": ["a", LONG]}),
    "long chat": (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    "long stream": (CHAT, {"messages": [{"role": "user", "content": LONG}], "stream": True}),
    "long completions": (COMPLETIONS, {"prompt": ["a", LONG]}),
    "long turn": ("/v1/chat/interactive", {"prompt": LONG, "session_id": 1, "interactive_mode": True}),
    "long perplexity": ("/get_ppl", {"input": LONG}),
    "long embedding": ("/v1/embeddings", {"input": LONG}),
    "bad field": (CHAT, {"messages": MESSAGES, "top_p": 9}),
    "unknown field": (CHAT, {"messages": MESSAGES, "colour": "red"}),
    "no model": (CHAT, {"messages": MESSAGES, "model": "other"}),
    "timeout": (CHAT, {"messages": MESSAGES, "timeout": 1e-9}),
    # Without a body: the server lingers for one that it has not read.
    "no route": ("/v1/nothing", None),
}


@pytest.mark.anyio
async def test_nothing_of_a_request_is_left() -> None:
    async with serving(FakeEngine()) as served:
        await answered(served, *BODIES["chat"])
        with no_cycles():
            for path, body in BODIES.values():
                await answered(served, path, body)
            await answered(served, "/v1/chat/interactive", {"prompt": "", "session_id": 1})
            await rest()


@pytest.mark.anyio
async def test_nothing_of_a_client_that_left_is_left() -> None:
    async with serving(FakeEngine("a" * 2000, delay_per_token=0.001)) as served:
        with no_cycles():
            for name in ("chat", "stream", "completions", "embeddings"):
                for delay in (0.0, 0.005, 0.02):
                    task = asyncio.ensure_future(answered(served, *BODIES[name]))
                    await asyncio.sleep(delay)
                    task.cancel()
                    await asyncio.wait([task])
            del task
            await rest()


async def answered(served: Served, path: str, body: Any) -> None:
    async with served.http.post(served.url + path, json=body, headers={"Connection": "close"}) as response:
        await response.read()


async def rest() -> None:
    """Wait until no request is there any more; a connection that is kept alive has its last one."""
    deadline = time.monotonic() + 20
    while left := names_of_those_alive():
        assert time.monotonic() < deadline, f"these are left: {sorted(left)}"
        await asyncio.sleep(0.002)


def names_of_those_alive() -> set[str]:
    """Names alone: who holds the things themselves keeps them alive."""
    requests = [thing for thing in gc.get_objects() if isinstance(thing, web.BaseRequest)]
    return {type(thing).__name__ for thing in (*alive(), *requests)}
