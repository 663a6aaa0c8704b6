"""GET /: the documentation page, one file that asks nobody but this server for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

__all__ = ["docs"]

PAGE = (Path(__file__).parent.parent / "assets" / "docs.html").read_bytes()


def _hashes(tag: bytes) -> str:
    """The sources of a Content-Security-Policy that allow the page's own elements of this tag, and no others."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'self'; script-src {_hashes(b'script')}; style-src {_hashes(b'style')}; img-src data:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def docs(request: web.Request) -> web.Response:
    """This page: the routes with their fields, and forms to try them."""
    # It needs no key, as a browser has none to send when somebody opens an address, and it is the same for every
    # server. What it shows of this one, it gets from /openapi.json with the key that is typed into it.
    return web.Response(body=PAGE, content_type="text/html", charset="utf-8", headers=HEADERS)
