"""GET /: what the page promises, and that a browser finds it so."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from asyncllm.server.docs.page import FOLDER, PAGE
from asyncllm.testing import FakeEngine
from tests.server.browser import CHROMIUM, browsing
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

TEXT = PAGE.decode()
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
            if tag in ("input", "textarea", "select"):
                self.fields.add(name)
        if tag == "label" and (target := given.get("for")) is not None:
            self.labels.add(target)
        self.addresses += [str(given[name]) for name in ("src", "href", "action") if name in given]
        self.handlers += [name for name in given if name.startswith("on") or name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_small_file_that_loads_nothing_from_elsewhere() -> None:
    assert len(PAGE) < 64_000
    assert not re.search(r"https?://[a-z]|//[a-z]+\.|@import|\burl\(", TEXT)
    outline = Outline()
    outline.feed(TEXT)
    outline.close()
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.handlers == []
    assert set(outline.addresses) == {"data:,", "#main", "#chat", "#routes"}
    assert outline.fields - outline.labels == {"stream", "markdown"}  # inside their labels
    assert '<html lang="en">' in TEXT
    assert set(re.findall(r'byId\("([\w-]+)"\)', TEXT)) <= set(outline.ids)


def test_every_file_of_the_page_is_in_it_and_none_is_long() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 500, path.name
        assert path.name == "index.html" or text in TEXT, path.name


def test_nothing_is_put_into_the_page_as_markup() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "Function("):
        assert way not in TEXT


def test_the_choice_of_colours_is_all_that_is_kept() -> None:
    assert re.findall(r"localStorage\.\w+\(([^)]*)\)", TEXT) == ['"theme", choice[0]', '"theme"']
    assert TEXT.count("localStorage") == 2
    for way in ("sessionStorage", "indexedDB", "document.cookie", "caches."):
        assert way not in TEXT


async def test_the_policy_allows_the_pages_own_scripts_and_no_other() -> None:
    async with serving(FakeEngine()) as served, served.http.get(served.url) as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
        body = await response.read()
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() for inside in found]
        assert policy[directive] == " ".join(f"'sha256-{digest}'" for digest in digests)
        assert len(digests) == body.decode().count(f"<{tag}")
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"


async def test_the_page_opens_without_a_key_and_can_be_switched_off() -> None:
    async with serving(FakeEngine(), api_keys=["secret"]) as served, served.http.get(served.url) as response:
        assert response.status == 200
        assert "fake" not in (await response.text()).casefold()  # nothing about this server
    async with serving(FakeEngine(), disable_docs=True) as served:
        assert (await served.get("/"))[0] == 404


@pytest.mark.one_loop
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
class TestInABrowser:
    async def test_a_key_opens_the_routes_and_a_form_tries_them(self, tmp_path: Path) -> None:
        async with (
            serving(FakeEngine({"Hello!": "pong"}), api_keys=["secret"]) as served,
            browsing(tmp_path, f"{served.url}/") as page,
        ):
            await page.until("byId('notice').textContent.includes('asks for a key')")
            await page.until("document.activeElement === byId('key')")
            await page.type("secret")
            await page.press("Enter")
            await page.until("document.querySelectorAll('details.route').length > 10")
            assert await page.value("byId('notice').hidden && byId('explorer').hidden")
            await page.value("byId('routes-link').click()")
            await page.until("byId('chat').hidden && !byId('explorer').hidden")
            route = "byId('route-chat_completions')"
            assert await page.value(f"{route}.querySelectorAll('tbody tr').length") > 20
            assert "Bearer $ASYNCLLM_API_KEY" in await page.value(f"{route}.textContent")
            assert "secret" not in await page.value("document.body.textContent")
            assert "secret" not in await page.value("JSON.stringify([{...localStorage}, {...sessionStorage}])")
            await page.value(f"{route}.querySelector('button.main').click()")
            await page.until(f"{route}.textContent.includes('200 in')")
            assert "pong" in await page.value(f"{route}.querySelector('pre').textContent")
