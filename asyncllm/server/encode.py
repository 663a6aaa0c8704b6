"""Structs as JSON, and as whole answers."""

from __future__ import annotations

import msgspec
from aiohttp import web

__all__ = ["encode", "json_response"]

encode = msgspec.json.Encoder().encode


def json_response(answer: msgspec.Struct, status: int = 200) -> web.Response:
    """An answer that is sent whole."""
    return web.Response(status=status, body=encode(answer), content_type="application/json")
