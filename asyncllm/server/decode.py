"""From the body of a request to a checked Struct; whatever is wrong with it becomes a 4xx that names the field."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from asyncllm.config import ServerConfig
from asyncllm.server.errors import ApiError

__all__ = ["read_body", "read_struct"]

Body = TypeVar("Body", bound=msgspec.Struct)

UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
FIELD = re.compile(r"\$\.(\w+)")
MISSING = re.compile(r"Object missing required field `(.*)`")


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


async def read_body(request: web.Request, config: ServerConfig) -> bytes:
    """The whole body. Raises ApiError 408, 413, 415."""
    if request.content_type != "application/json":
        # A browser sends text/plain across origins without asking, but not this type.
        raise ApiError(
            415,
            "The body must be JSON: send the header Content-Type: application/json.",
            code="unsupported_media_type",
            headers={"Connection": "close"},
        )
    try:
        async with asyncio.timeout(config.body_timeout):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {config.body_timeout:g} seconds.",
            code="body_timeout",
            headers={"Connection": "close", "x-should-retry": "false"},
        ) from None
    except (web.RequestPayloadError, UnicodeError, ValueError) as error:
        raise ApiError(
            400, "The body could not be read: its framing or its encoding is broken.", code="invalid_body"
        ) from error


async def read_struct(request: web.Request, kind: type[Body], config: ServerConfig) -> Body:
    """The body as `kind`. Raises ApiError."""
    body = await read_body(request, config)
    try:
        decoded: Body = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"The body is no JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body's JSON is nested too deeply.", code="invalid_json") from None
    return decoded


def _invalid(text: str) -> ApiError:
    if found := UNKNOWN.search(text):
        name = found[1][:64]
        return ApiError(
            400, f"There is no parameter {name!r} here. Leave it out.", code="unknown_parameter", param=name
        )
    if found := MISSING.search(text):
        return ApiError(
            400, f"The parameter {found[1]!r} is missing.", code="missing_required_parameter", param=found[1]
        )
    what, _, where = text.partition(" - at ")
    field = FIELD.search(where)
    param = field[1] if field else None
    place = where.strip("`").removeprefix("$.") if field else "the body"
    return ApiError(400, f"{place}: {what}.", code="invalid_type", param=param)
