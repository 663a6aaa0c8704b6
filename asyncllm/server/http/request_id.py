"""The id of a request: the client's X-Request-Id, or a new one. It is in the log, and a header of the answer."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

__all__ = ["HEADER", "REQUEST_ID", "give_id"]

HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
"""Set by `give_id`, which the entry point calls."""

GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def give_id(request: web.Request) -> None:
    """Set the request's id, which is the client's own if that is valid."""
    given = request.headers.get(HEADER, "")
    request[REQUEST_ID] = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
