"""What the distributor adds to a request and to a streamed chunk: the same load sent to a node directly and through it.

The node answers at once, so that the figures are those of HTTP alone; node, distributor and client are a process each.

    python bench/distributor.py --requests 2000 --chunks 200 --streams 32
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import aiohttp
import uvloop
from aiohttp import web

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor.run import run

EVENT = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
WHOLE = {"id": "chatcmpl-0", "choices": [{"index": 0, "message": {"content": "x" * 200}}]}


def node(pipe: Connection) -> None:
    """Serve a node that answers at once, with as many chunks as `max_tokens` says."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body["stream"]:
            return web.json_response(WHOLE)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(EVENT)
            await asyncio.sleep(0)
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/health/ready", lambda request: asyncio.sleep(0, web.Response()))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    uvloop.run(serve())


def distributor(pipe: Connection, node_url: str) -> None:
    """Distribute to the node, and tell the processor time taken so far whenever asked."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            try:
                pipe.recv()
            except EOFError:
                loop.remove_reader(pipe.fileno())
                return
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(usage.ru_utime + usage.ru_stime)

        loop.add_reader(pipe.fileno(), tell)
        await run(DistributorConfig(server_port=0, nodes=[node_url]), pipe.send)

    uvloop.run(serve())


async def load(url: str, requests: int, streams: int, chunks: int) -> float:
    """Send the requests, so many at a time, each with so many chunks, 0 for a whole answer; returns the seconds."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi " * 50}],
        "stream": chunks > 0,
        "max_tokens": chunks,
    }
    left = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                received = len(await response.read())
                assert response.status == 200
                assert received > chunks * len(EVENT) - 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(streams):
                clients.create_task(client(session))
        return time.perf_counter() - began


async def wait_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/health/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


def started(target: Callable[..., None], *arguments: str) -> tuple[str, Connection]:
    """Start a process of its own; returns its address, and the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True).start()
    return str(ours.recv()), ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    node_url, _ = started(node)
    url, pipe = started(distributor, node_url)
    uvloop.run(wait_ready(url))

    def spent() -> float:
        pipe.send(None)
        return float(pipe.recv())

    print("| load | direct, a second | through it, a second | ratio | its processor time, us |")
    print("| --- | --- | --- | --- | --- |")
    for what, at_once, chunks in (
        ("requests, one at a time", 1, 0),
        (f"requests, {options.streams} at a time", options.streams, 0),
        (f"chunks, {options.streams} streams", options.streams, options.chunks),
    ):
        requests = options.requests if not chunks else options.requests // 10
        units = requests * max(1, chunks)
        for address in (node_url, url):
            uvloop.run(load(address, min(100, requests), at_once, chunks))
        direct = uvloop.run(load(node_url, requests, at_once, chunks))
        before = spent()
        through = uvloop.run(load(url, requests, at_once, chunks))
        each = (spent() - before) / units * 1e6
        print(f"| {what} | {units / direct:,.0f} | {units / through:,.0f} | {direct / through:.2f} | {each:.0f} |")


if __name__ == "__main__":
    main()
