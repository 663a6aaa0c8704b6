"""What a streamed token costs a server's processor, and how evenly chunks arrive: ours beside FastAPI on uvicorn.

    python bench/streams.py
    python bench/streams.py --streams 1000 --tokens 200 --step-ms 100 --json FILE

No model runs: `asyncllm.testing.FakeEngine` makes up a token for every stream each --step-ms, and a FastAPI program
yields the same events at the same pace. It is run three times: as `pip install fastapi uvicorn` gives it, with events
made by pydantic (`fastapi`); on uvloop and httptools (`fastapi_fast`); and there with events that were encoded
beforehand, so that only HTTP is left (`fastapi_bytes`). Each server is a process of its own; another one reads all
streams. The keys:

    cpu_us_per_token     processor time of the server's event loop thread per chunk, without start-up
    process_us_per_token the same of the whole process, the fake device's thread included
    gap_p99_ms           99th percentile of the time between two chunks of a stream, less the pace
    loop_gap_ms          longest time that the loop did not come round while a prompt of --long-prompt characters was
                         read by the real tokenizer of tiny-chat (asyncllm alone)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import aiohttp
import uvloop
from table import emit
from tqdm import tqdm

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.config import ServerConfig
from asyncllm.server.http.listening import bind
from asyncllm.server.run import loaded_objects_frozen, open_service, serve_until_stopped
from asyncllm.testing import FakeEngine

PROMPT = "ping"


def cpu_seconds() -> tuple[float, float]:
    """Processor time so far: of this thread, of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.thread_time(), usage.ru_utime + usage.ru_stime


@asynccontextmanager
async def ours(arguments: argparse.Namespace) -> AsyncIterator[int]:
    """Our server over a fake engine. Yields its port."""
    engine = FakeEngine(
        "x" * arguments.tokens,
        EngineConfig(max_batch_size=arguments.streams, enable_prefix_caching=False),
        delay_per_token=arguments.step_ms / 1000,
        num_slots=arguments.streams,
        num_blocks=arguments.streams * (arguments.tokens // 64 + 2),
        block_size=64,
    )
    async with served(engine) as port:
        yield port


@asynccontextmanager
async def served(engine: AsyncEngine) -> AsyncIterator[int]:
    """Serve an engine that has not been started. Yields the port."""
    service = open_service(engine, ServerConfig(server_port=0, generation_config="none"))
    async with engine:
        listener = bind(service.config)
        task = asyncio.create_task(serve_until_stopped(service, listener))
        try:
            with loaded_objects_frozen(service.supervisor):
                yield listener.getsockname()[1]
        finally:
            service.state.stop.set()
            service.state.stop_now.set()
            await task


@asynccontextmanager
async def fastapi(
    arguments: argparse.Namespace, *, http: Literal["h11", "httptools"] = "httptools", encoded: bool = False
) -> AsyncIterator[int]:
    """A minimal FastAPI program on uvicorn that streams the same events. Yields its port."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel

    class Choice(BaseModel):
        index: int = 0
        text: str
        logprobs: None = None
        finish_reason: str | None = None

    class Event(BaseModel):
        id: str = "cmpl-0123456789abcdef0123456789abcdef"
        object: str = "text_completion"
        created: int = 1_700_000_000
        model: str = "fake"
        choices: list[Choice]

    def event() -> str:
        return f"data: {Event(choices=[Choice(text='x')]).model_dump_json()}\n\n"

    once = event()
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            due = time.perf_counter()
            for _ in range(arguments.tokens):
                due += arguments.step_ms / 1000
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                yield once if encoded else event()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    config = uvicorn.Config(app, port=0, log_level="critical", loop="none", http=http, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


SERVERS: dict[str, Callable[[argparse.Namespace], AbstractAsyncContextManager[int]]] = {
    "asyncllm": ours,
    "fastapi": partial(fastapi, http="h11"),
    "fastapi_fast": fastapi,
    "fastapi_bytes": partial(fastapi, encoded=True),
}
PLAIN_LOOP = {"fastapi"}
"""Servers on asyncio's own event loop."""


def serve(name: str, arguments: argparse.Namespace, connection: Connection) -> None:
    """The main function of a server's process: sends its port, and processor times whenever it is asked."""

    async def main() -> None:
        async with SERVERS[name](arguments) as port:
            connection.send(port)
            loop = asyncio.get_running_loop()
            asked = asyncio.Event()
            loop.add_reader(connection.fileno(), asked.set)
            while True:
                await asked.wait()
                asked.clear()
                while connection.poll():
                    if connection.recv() is None:
                        return
                    connection.send(cpu_seconds())

    raise_file_limit()
    if name in PLAIN_LOOP:
        asyncio.run(main())
    else:
        uvloop.run(main())


def raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def read_streams(port: int, arguments: argparse.Namespace) -> list[float]:
    """Read all streams to their ends. -> seconds between two chunks of a stream, less the pace, of all of them."""
    body = json.dumps({"model": "fake", "prompt": PROMPT, "max_tokens": arguments.tokens, "stream": True}).encode()
    gaps: list[float] = []
    pace = arguments.step_ms / 1000

    async def read(http: aiohttp.ClientSession) -> None:
        headers = {"Content-Type": "application/json"}
        last = None
        seen = 0
        async with http.post(f"http://127.0.0.1:{port}/v1/completions", data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for data in response.content.iter_any():
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last - pace)
                last = now
                seen += data.count(b"data: ")
        assert seen >= arguments.tokens, f"{seen} events of {arguments.tokens}"

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*(read(http) for _ in range(arguments.streams)))
    return gaps


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one server."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(name, arguments, there), daemon=True)
    process.start()
    port = here.recv()

    def used() -> tuple[float, float]:
        here.send("cpu")
        thread, whole = here.recv()
        return thread, whole

    before = used()
    gaps = sorted(uvloop.run(read_streams(port, arguments)))
    after = used()
    here.send(None)
    process.join(timeout=30)
    tokens = arguments.streams * arguments.tokens
    return {
        "engine": name,
        "work": f"streams_{arguments.streams}",
        "cpu_us_per_token": round(1e6 * (after[0] - before[0]) / tokens, 1),
        "process_us_per_token": round(1e6 * (after[1] - before[1]) / tokens, 1),
        "gap_p50_ms": round(1000 * gaps[len(gaps) // 2], 1),
        "gap_p99_ms": round(1000 * gaps[int(len(gaps) * 0.99)], 1),
        "gap_max_ms": round(1000 * gaps[-1], 1),
    }


async def longest_gap(prompt_characters: int) -> float:
    """Seconds that the loop of a server did not come round while a long prompt was read and refused."""
    gaps: list[float] = []
    done = asyncio.Event()

    async def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    async with served(AsyncEngine("tiny-chat")) as port:
        watcher = asyncio.create_task(watch())
        text = "Is this a long prompt? Yes, it is. " * (prompt_characters // 35 + 1)
        async with aiohttp.ClientSession() as http:
            body = {"prompt": text, "max_tokens": 1}
            async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                answer = await response.json()
        assert answer["error"]["code"] == "context_length_exceeded", answer
        print(answer["error"]["message"], file=sys.stderr)
        done.set()
        await watcher
    return max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="streams at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="milliseconds per token (default: %(default)s)")
    parser.add_argument("--servers", default=",".join(SERVERS), help="comma-separated (default: all)")
    parser.add_argument("--long-prompt", type=int, default=600_000, help="characters; 0: leave out")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    raise_file_limit()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in tqdm(arguments.servers.split(","), unit="server", file=sys.stderr, leave=False):
        emit(measure(name, arguments), arguments.json)
    if arguments.long_prompt:
        gap = uvloop.run(longest_gap(arguments.long_prompt))
        emit({"engine": "asyncllm", "work": "long_prompt", "loop_gap_ms": round(1000 * gap, 1)}, arguments.json)


if __name__ == "__main__":
    main()
