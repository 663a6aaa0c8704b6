"""Decodes the body of a request into a validated Struct; every error becomes a 4xx that names the field.

A body is first split into its fields without decoding them: null means that a field is omitted, and names that the
Struct lacks are unsupported or unknown. Then the fields are decoded; as on other servers, they may have other types:
20.0 or "20" for 20, "true" for true.

Decoding holds the interpreter lock: 20 ms for 4 MiB of text or token ids, but up to a second for as many bytes of empty
lists. A body's parts are therefore counted before it is decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import quote

import msgspec
from aiohttp import web

from asyncllm.config.settings import choices
from asyncllm.server.http.body import read_body
from asyncllm.server.http.errors import FORM, ApiError
from asyncllm.server.request.fields import Body, FurtherFields
from asyncllm.server.request.unsupported import UNSUPPORTED, check_unsupported
from asyncllm.server.service import service_of

__all__ = [
    "BODY",
    "FORM_FIELD",
    "IGNORED",
    "PROMPT_FIELD",
    "check_shape",
    "named_in_a_header",
    "read_body_of",
    "read_request",
]

Kind = TypeVar("Kind", bound=Body)

IGNORED = web.RequestKey("IGNORED", list[str])
"""Unknown names in the body that were ignored, with `unknown_fields="ignore"`."""
BODY = web.RequestKey("BODY", bytes)
"""The body, if it was read to find its route."""
PROMPT_FIELD = web.RequestKey("PROMPT_FIELD", str)
"""The body's field that holds the prompt, for errors about it."""
FORM_FIELD = web.RequestKey("FORM_FIELD", str)
"""The field with the constraint on the answer, for errors about it."""
FORM_FIELDS = {
    **{name: name for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")},
    **{name: name for name in ("json_schema", "regex", "ebnf", "grammar", "format")},
    "text": "text.format",
    "output_config": "output_config.format",
    "output_format": "output_format",
}
PROMPT_FIELDS = ("input_ids", "messages", "prompt", "input", "tokens")

MAX_NAMED = 32
"""Maximum number of names in the header that lists ignored ones."""

UNCOUNTED_BYTES = 2**17
MAX_PARTS = 2**17
"""Maximum number of objects, lists, members and strings. 4,096 messages with a tool call each have 100,000."""
MAX_VALUES = 2**20
"""Maximum number of list elements, such as token ids."""

MISSING = re.compile(r"Object missing required field `(.*)`")
PLACE = re.compile(r"(.*) - at (`key` in )?`\$\.?((\w*).*)`", re.DOTALL)
"""The message, whether it concerns a key, the path, and the top-level field."""
PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""Surrogates in JSON: a pair is a character, and a half of one is none."""

BOM = b"\xef\xbb\xbf"
"""The mark with which some programs on Windows begin UTF-8."""
NULL = msgspec.Raw(b"null")

_fields_in = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


async def read_body_of(request: web.Request) -> bytes:
    """Return the body, once. Raises ApiError."""
    service = service_of(request)
    # Ollama's documentation shows calls without Content-Type.
    undeclared = request.path.startswith("/api/")
    data = await read_body(request, service.config.body_timeout, service.max_body_bytes, undeclared=undeclared)
    check_shape(data)
    return data.removeprefix(BOM)


async def read_request(request: web.Request, kind: type[Kind]) -> Kind:
    """Return the body as `kind`, checked against the served model. Raises ApiError."""
    service = service_of(request)
    data = request[BODY] if BODY in request else await read_body_of(request)
    body, unknown = _decoded(data, kind)
    if unknown and service.config.unknown_fields == "refuse":
        raise _unknown(*unknown[0])
    request[IGNORED] = [f"{inside}.{name}" if inside else name for inside, name in unknown]
    request[PROMPT_FIELD] = next((name for name in PROMPT_FIELDS if getattr(body, name, None) is not None), "prompt")
    request[FORM_FIELD] = next(
        (said for name, said in FORM_FIELDS.items() if getattr(body, name, None) is not None), FORM
    )
    service.check_model(body.model)
    return body


def named_in_a_header(names: list[str]) -> str:
    """Return the first names, percent-encoded and separated by commas."""
    shown = [quote(name[:64], safe=".", errors="replace") for name in names[:MAX_NAMED]]
    return ", ".join([*shown, "..."] if len(names) > MAX_NAMED else shown)


def _decoded(data: bytes, kind: type[Kind]) -> tuple[Kind, list[tuple[str, str]]]:
    """Return the Struct, and unknown names, each with its enclosing field. Raises ApiError."""
    unknown: list[tuple[str, str]] = []
    try:
        kept = _known(_unfolded(_fields_in(data)), kind, unknown)
        body: Kind = _decoder(kind).decode(_joined(kept))
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        why = (
            "a text has half of a surrogate pair, as of an emoji cut in two"
            if HALF_PAIR.search(PAIR.sub(b"", data))
            else error
        )
        raise ApiError(400, f"The body is not JSON: {why}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body's JSON is nested too deeply.", code="invalid_json") from None
    for name in kept:
        if not _is_finite(getattr(body, name)):
            raise ApiError(400, f"{name}: Expected a finite number.", code="invalid_value", param=name)
    return body, unknown


def _unfolded(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the fields including those that LMDeploy's APIClient puts under `kwargs`, the additional arguments of its
    methods."""
    further = fields.get("kwargs")
    if further is None or not _is_object(further):
        return fields
    return {**_fields_in(further), **fields, "kwargs": NULL}


def _known(
    fields: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct], unknown: list[tuple[str, str]], inside: str = ""
) -> dict[str, msgspec.Raw]:
    """Return the non-null fields that the Struct has. Raises ApiError for unsupported values; appends unknown
    names to `unknown`."""
    kept = {}
    for name, value in fields.items():
        if name in kind.__struct_fields__:
            nested = _nested(kind).get(name)
            if nested is not None and _is_object(value):
                value = msgspec.Raw(_joined(_known(_fields_in(value), nested, unknown, name)))
            if value != NULL:
                kept[name] = value
        elif name in UNSUPPORTED and (not inside or issubclass(kind, FurtherFields)):
            check_unsupported(name, msgspec.json.decode(value))
        else:
            unknown.append((inside, name))
    return kept


def _is_object(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"{"


def _joined(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """Return the fields as one JSON object."""
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items()) + b"}"


@cache
def _nested(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the fields whose value is a Struct."""
    return {
        name: each
        for name, hint in get_type_hints(kind).items()
        for each in get_args(hint)
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    }


def _is_finite(value: Any) -> bool:
    """Return whether a number, or every number of a dict, is finite; unlike JSON, text can spell other numbers."""
    if isinstance(value, dict):
        return all(_is_finite(each) for each in value.values() if isinstance(each, float))
    return not isinstance(value, float) or math.isfinite(value)


def _unknown(inside: str, name: str) -> ApiError:
    return ApiError(
        400,
        f"There is no parameter {name[:64]!r} {f'in {inside}' if inside else 'here'}. Leave it out.",
        code="unknown_parameter",
        param=inside or name[:64],
    )


def _invalid(text: str, kind: type[msgspec.Struct]) -> ApiError:
    place = PLACE.fullmatch(text)
    what, where, field = (place[1], place[3], place[4] or None) if place else (text, "", None)
    if place and place[2]:
        what = f"a key: {what}"
    if found := MISSING.fullmatch(what):
        return ApiError(
            400,
            f"The parameter {found[1]!r} is missing{f' in {where}' if where else ''}.",
            code="missing_required_parameter",
            param=field or found[1],
        )
    if what.startswith("Invalid enum value") and where == field:
        what = f"{what}. It is one of {', '.join(map(repr, choices(get_type_hints(kind)[field])))}"
    code = "invalid_type" if ", got " in what else "invalid_value"
    return ApiError(400, f"{where or 'The body'}: {what}.", code=code, param=field)


def check_shape(body: bytes) -> None:
    """Raise ApiError 400 for a body with so many parts that decoding it would delay others."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    strings = plain.count(b'"') // 2
    # Every other piece is inside a string.
    outside = b"".join(plain.split(b'"')[::2]) if strings <= MAX_PARTS else b""
    parts = strings + sum(map(outside.count, (b"[", b"{", b":")))
    if parts > MAX_PARTS:
        raise _too_many(f"at least {parts} objects, lists, names and texts", MAX_PARTS)
    values = outside.count(b",")
    if values > MAX_VALUES:
        raise _too_many(f"{values} values", MAX_VALUES)


def _too_many(what: str, limit: int) -> ApiError:
    return ApiError(
        400,
        f"The body holds {what}, and the server takes at most {limit} in a request. Send fewer.",
        code="too_many_values",
    )
