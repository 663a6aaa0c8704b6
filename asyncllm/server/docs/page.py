"""GET /: a page with a chat and forms for the routes. It loads nothing from other servers."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

__all__ = ["docs"]

FOLDER = Path(__file__).parents[2] / "assets" / "page"


def _inlined() -> bytes:
    """Return index.html with its style sheet and scripts inlined."""
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    for reference, tag in (
        (r'<link rel="stylesheet" href="([\w.]+)">', "style"),
        (r'<script src="([\w.]+)"></script>', "script"),
    ):
        pieces = re.split(reference, page)
        for index in range(1, len(pieces), 2):
            pieces[index] = f"<{tag}>\n{(FOLDER / pieces[index]).read_text(encoding='utf-8')}</{tag}>"
        page = "".join(pieces)
    return page.encode()


PAGE = _inlined()


def _hashes(tag: bytes) -> str:
    """Return the Content-Security-Policy sources that allow exactly the page's own elements of this tag."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes(b'script')}; style-src {_hashes(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # The browser itself refuses to parse text as markup.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def docs(request: web.Request) -> web.Response:
    """This page: a chat with the model, the routes with their fields, and forms to try them."""
    # The page needs no key, since a browser sends none when its user opens an address, and it is the same for every
    # server. It reads this server's details from /openapi.json, with the key that the user types in.
    return web.Response(body=PAGE, content_type="text/html", charset="utf-8", headers=HEADERS)
