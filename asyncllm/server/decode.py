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
from asyncllm.server.requests import Body, refuse_unsupported
from asyncllm.server.service import service_of

__all__ = ["read_request"]

Kind = TypeVar("Kind", bound=Body)

UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(.*)`")
PLACE = re.compile(r"(.*) - at (`key` in )?`\$\.?((\w*).*)`", re.DOTALL)
"""What is wrong, whether with the key of an object, where, and the field that this is in."""


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


async def _read_body(request: web.Request, config: ServerConfig) -> bytes:
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
            400,
            "The body could not be read: its framing or its encoding is broken.",
            code="invalid_body",
            headers={"Connection": "close"},
        ) from error


async def read_request(request: web.Request, kind: type[Kind]) -> Kind:
    """The body as `kind`, for the model that is served, with nothing in it that is refused. Raises ApiError."""
    service = service_of(request)
    body = _decoded(await _read_body(request, service.config), kind)
    service.check_model(body.model)
    refuse_unsupported(body)
    return body


def _decoded(body: bytes, kind: type[Kind]) -> Kind:
    try:
        decoded: Kind = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"The body is no JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body's JSON is nested too deeply.", code="invalid_json") from None
    return decoded


def _invalid(text: str) -> ApiError:
    place = PLACE.fullmatch(text)
    what, where, field = (place[1], place[3], place[4] or None) if place else (text, "", None)
    if place and place[2]:
        what = f"a key: {what}"
    inside = f" in {where}" if where else ""
    if found := UNKNOWN.fullmatch(what):
        name = found[1][:64]
        return ApiError(
            400,
            f"There is no parameter {name!r}{inside or ' here'}. Leave it out.",
            code="unknown_parameter",
            param=field or name,
        )
    if found := MISSING.fullmatch(what):
        return ApiError(
            400,
            f"The parameter {found[1]!r} is missing{inside}.",
            code="missing_required_parameter",
            param=field or found[1],
        )
    return ApiError(400, f"{where or 'the body'}: {what}.", code="invalid_type", param=field)
