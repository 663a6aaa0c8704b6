"""Images over HTTP: data: URLs, addresses of allowed domains, and nothing that is the server's own."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidParameter
from asyncllm.config.server import ServerConfig
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request import media
from asyncllm.server.request.media import MAX_BYTES, MediaFetcher, is_public
from asyncllm.server.service import MAX_BODY
from tests.server.serving import serving
from tests.vl.checkpoints import folder_of, picture

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


def data_url(seed: int) -> str:
    buffer = BytesIO()
    picture(seed).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def question(*urls: Any, text: str = "what?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_a_chat_with_images(tmp_path: Path) -> None:
    engine = AsyncEngine(str(folder_of("llava")), EngineConfig(block_size=8, num_gpu_blocks=128))
    (tmp_path / "x.png").write_bytes(b"secret")
    async with serving(engine) as server:
        greedy = GenerationConfig(max_new_tokens=5, temperature=0, ignore_eos=True)
        expected = await engine.generate(("what?", [picture(1), picture(2)]), greedy)
        status, body = await server.post("/v1/chat/completions", question(data_url(1), data_url(2)))
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == expected.text
        assert body["usage"]["prompt_tokens"] == expected.input_token_len
        details = body["usage"]["prompt_tokens_details"]
        assert (details["images"], details["image_tokens"]) == (2, 32)
        photograph = BytesIO()
        picture(1).resize((1300, 1200)).save(photograph, "PNG", compress_level=0)
        url = f"data:image/png;base64,{base64.b64encode(photograph.getvalue()).decode()}"
        assert len(url) > MAX_BODY
        assert (await server.post("/v1/chat/completions", question(url)))[0] == 200
        status, body = await server.post(
            "/v1/chat/completions", question(data_url(1)) | {"mm_processor_kwargs": {"a": 1}}
        )
        assert (status, body["error"]["param"]) == (400, "mm_processor_kwargs")
        refused = {
            str(tmp_path / "x.png"): "Files of the server",
            f"file://{tmp_path}/x.png": "Files of the server",
            "https://example.com/x.png": "does not fetch images from 'example.com'",
            "http://127.0.0.1/x.png": "does not fetch",
            "data:image/png;base64,AAAA": "no format",
            "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(): "SVG",
        }
        for source, says in refused.items():
            for path, name in (("/v1/chat/completions", "messages"), ("/v1/chat/interactive", "prompt")):
                content = question(source)["messages"]
                status, body = await server.post(path, {name: content})
                assert status == 400, source
                assert says in body["error"]["message"]
        engine.check_idle()


async def test_spellings_of_other_servers_and_libraries() -> None:
    url, text = data_url(1), {"type": "text", "text": "what?"}
    spelled: list[list[Any]] = [
        [{"type": "image_url", "image_url": {"url": url}}, text],
        [{"type": "image_url", "image_url": url, "uuid": "a", "cache_control": {"type": "ephemeral"}}, text],
        [{"image_url": url, "uuid": None}, "what?"],
        [{"image_url": {"url": url, "detail": None}, "modalities": "multi-images"}, {"text": "what?"}],
        [{"type": "image", "image": url}, text],
        [{"type": "image", "url": url}, text],
        [{"type": "image", "base64": url.partition(",")[2]}, text],
        [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}],
        [{"type": "input_image", "image_url": {"url": url}, "detail": "high"}, text],
    ]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"type": "image_url", "image_url": url, "max_pixels": 16}, "max_pixels=16: this model's"),
        ({"type": "image", "image": url, "resized_height": 16}, "unknown option 'resized_height'"),
        ({"type": "input_image", "file_id": "a"}, "names nothing"),
        ({"type": "image", "path": "/etc/hostname"}, "Files of the server are not read"),
        ({"type": "image", "base64": "x.png"}, "is not base64"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, "names nothing"),
        ({"type": "image_url", "image_url": {"url": url.partition(",")[2]}}, "Put data:image/png;base64, in front"),
        ({"type": ["image_url"], "image_url": url}, "not a part"),
        ({"audio_url": url}, "not a part"),
    ]
    engine = AsyncEngine(str(folder_of("llava")), EngineConfig(block_size=8, num_gpu_blocks=128))
    async with serving(engine) as server:
        answers = []
        for content in spelled:
            asked = question() | {"messages": [{"role": "user", "content": content}]}
            status, body = await server.post("/v1/chat/completions", asked)
            assert status == 200, (content, body)
            assert body["usage"]["prompt_tokens_details"]["images"] == 1
            answers.append(body["choices"][0]["message"]["content"])
        assert len(set(answers)) == 1
        for part, says in refused:
            asked = question() | {"messages": [{"role": "user", "content": [part, text]}]}
            status, body = await server.post("/v1/chat/completions", asked)
            assert status == 400, part
            assert says in body["error"]["message"], body
    async with serving(AsyncEngine(str(folder_of("llava")), engine.config), unknown_fields="ignore") as server:
        part = {"type": "image_url", "image_url": url, "resized_height": 16}
        asked = question() | {"messages": [{"role": "user", "mood": "good", "content": [part, part, "what?"]}]}
        async with server.http.post(f"{server.url}/v1/chat/completions", json=asked) as response:
            assert response.status == 200
            assert response.headers["X-Ignored-Fields"] == "messages.mood, messages.content.resized_height"


async def test_images_of_lmdeploys_own_fields() -> None:
    engine = AsyncEngine(str(folder_of("llava")), EngineConfig(block_size=8, num_gpu_blocks=128))
    greedy = GenerationConfig(max_new_tokens=5, temperature=0, ignore_eos=True)
    usual = {"temperature": 0, "ignore_eos": True}
    async with serving(engine) as server:
        for urls, images in (
            (data_url(1), [picture(1)]),
            ([data_url(2), data_url(1)], [picture(2), picture(1)]),
            ({"url": data_url(1), "detail": "high"}, [picture(1)]),
            ([data_url(2), {"url": data_url(1)}], [picture(2), picture(1)]),
        ):
            asked = {"prompt": "what?", "image_url": urls, "request_output_len": 5, **usual}
            status, body = await server.post("/v1/chat/interactive", asked)
            assert status == 200, body
            assert body["text"] == (await engine.generate(("what?", images), greedy)).text
            asked = {"prompt": "what?", "image_data": urls, "max_tokens": 5, **usual}
            status, body = await server.post("/generate", asked)
            assert status == 200, body
            plain = await engine.generate(("what?", images), greedy, do_preprocess=False)
            assert body["output_ids"] == plain.token_ids
            assert body["meta_info"]["prompt_tokens"] == plain.input_token_len
        kept: dict[str, Any] = {"session_id": 5, "interactive_mode": True, "request_output_len": 2, **usual}
        _, first = await server.post("/v1/chat/interactive", {"prompt": "a", "image_url": data_url(1), **kept})
        _, second = await server.post("/v1/chat/interactive", {"prompt": "b", "image_url": data_url(2), **kept})
        assert second["history_tokens"] >= first["input_tokens"] > 16
        assert second["input_tokens"] > 16
        for path, field in (("/v1/chat/interactive", "image_url"), ("/generate", "image_data")):
            for source in ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x.png", "data:image/png;base64,AAAA"):
                status, _ = await server.post(path, {"prompt": "what?", field: source})
                assert status == 400, source
                status, _ = await server.post(path, {"prompt": "what?", field: [{"url": source}]})
                assert status == 400, source
            status, body = await server.post(path, {"prompt": "what?", field: {"url": data_url(1), "max_pixels": 9}})
            assert (status, "max_pixels=9" in body["error"]["message"]) == (400, True)
        engine.check_idle()


async def test_a_tool_may_answer_with_an_image() -> None:
    engine = AsyncEngine(str(folder_of("qwen2_vl")), EngineConfig(block_size=8, num_gpu_blocks=128))
    async with serving(engine) as server:
        content = question(data_url(1))["messages"][0]["content"]
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "a", "content": content}
        body = question(data_url(2)) | {"messages": [{"role": "user", "content": "look"}, called, result]}
        status, answer = await server.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["images"] == 1


class _Fixed(AbstractResolver):
    """Names of the test's own server."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> Any:
        return [
            {"hostname": host, "host": "127.0.0.1", "port": self._port, "family": 2, "proto": 0, "flags": 0},
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def picture_file(request: web.Request) -> web.Response:
        return web.Response(body=b"pixels")

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(MAX_BYTES + 1))

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        raise web.HTTPFound(f"/slow?{request.query_string}x")

    app = web.Application()
    app.add_routes([web.get("/x.png", picture_file), web.get("/moved", moved), web.get("/large", large)])
    app.add_routes([web.get("/slow", slow)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_what_is_fetched(port: int) -> None:
    fetcher = MediaFetcher(["Images.example"], accepts=lambda address: True, resolver=_Fixed(port))
    assert await fetcher.fetch(f"http://images.example:{port}/x.png") == b"pixels"
    assert await fetcher.fetch(f"http://images.example:{port}/moved?to=/x.png") == b"pixels"
    for path, says in (
        ("moved?to=/moved?to=/moved", "redirects|fetched"),
        ("moved?to=http://other.example/x.png", "does not fetch images from 'other.example'"),
        ("moved?to=file:///etc/passwd", "http"),
        ("large", "bytes"),
        ("absent", "status 404"),
    ):
        with pytest.raises(ApiError, match=says):
            await fetcher.fetch(f"http://images.example:{port}/{path}")


async def test_an_address_has_its_seconds_with_all_redirects(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SECONDS", 0.25)
    fetcher = MediaFetcher(["*"], accepts=lambda address: True, resolver=_Fixed(port))
    with pytest.raises(ApiError, match="TimeoutError"):
        await fetcher.fetch(f"http://images.example:{port}/slow")


async def test_what_a_request_has_fetched_is_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_TOTAL", 13)
    fetcher = MediaFetcher(["*"], accepts=lambda address: True, resolver=_Fixed(port))
    for _ in range(2):
        assert await fetcher.fetch(f"http://images.example:{port}/x.png") == b"pixels"
    with pytest.raises(ApiError, match="more than 13 bytes"):
        await fetcher.fetch(f"http://images.example:{port}/x.png")


async def test_private_addresses_are_never_connected_to(port: int) -> None:
    anywhere = MediaFetcher(["*"], resolver=_Fixed(port))
    for host in ("images.example", "127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "[64:ff9b::7f00:1]"):
        with pytest.raises(ApiError, match="private network"):
            await anywhere.fetch(f"http://{host}:{port}/x.png")
    with pytest.raises(ApiError, match="user or a password"):
        await anywhere.fetch(f"http://me:secret@images.example:{port}/x.png")


def test_names_of_hosts_that_are_none() -> None:
    for host in ("a.example,b.example", "https://a.example", "a.example:80", "a.example/x"):
        with pytest.raises(InvalidParameter, match="is not a host name"):
            ServerConfig(allowed_media_domains=["*", host]).checked()
    ServerConfig(allowed_media_domains=["a.example", "2001:4860:4860::8888"]).checked()


def test_public_addresses() -> None:
    assert is_public("8.8.8.8")
    assert is_public("2001:4860:4860::8888")
    assert is_public("64:ff9b::808:808"), "as a network of IPv6 alone has addresses of IPv4"
    for address in ("192.168.0.1", "fe80::1%eth0", "fd00::1", "0.0.0.0", "224.0.0.1", "nonsense", "ff02::1", "fec0::1"):
        assert not is_public(address)
    for within in (
        "::ffff:7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a00:1",
        "2002:a00:1::",
        "::7f00:1",
        "::ffff:0:a00:1",
    ):
        assert not is_public(within), "an address of IPv4 stands in it"


async def test_how_images_are_prepared_may_be_said_on_every_route() -> None:
    """An image of 20 tokens, or of fewer where fewer pixels are allowed."""
    url = data_url(1)
    data = url.partition(",")[2]
    responses = {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url}],
            }
        ],
        "max_output_tokens": 3,
    }
    source = {"type": "base64", "media_type": "image/png", "data": data}
    messages = {
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    }
    engine = AsyncEngine(str(folder_of("qwen2_vl")), EngineConfig(block_size=8, num_gpu_blocks=128))
    async with serving(engine) as server:

        async def tokens(route: str, body: dict[str, Any], options: dict[str, Any] | None = None) -> int:
            more = {} if options is None else {"mm_processor_kwargs": options}
            status, answer = await server.post(route, body | more)
            assert status == 200, answer
            usage = answer.get("usage", answer)
            return int(usage.get("input_tokens") or usage["prompt_tokens"])

        for route, body in (
            ("/v1/chat/completions", question(url)),
            ("/v1/responses", responses),
            ("/v1/messages", messages | {"max_tokens": 3}),
            ("/v1/messages/count_tokens", messages),
        ):
            usual = await tokens(route, body)
            assert usual - await tokens(route, body, {"max_pixels": 8 * 8 * 6}) == 20 - 4, route
            assert await tokens(route, body, {}) == usual
            for wrong in ({"max_pixels": 1}, {"a": 1}, {"max_dynamic_patch": 2}):
                status, answer = await server.post(route, body | {"mm_processor_kwargs": wrong})
                assert status == 400, (route, answer)
