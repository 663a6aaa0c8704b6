"""What an answer shall be held to, in the spellings of OpenAI, LMDeploy, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from asyncllm.server.http.errors import ApiError

__all__ = ["Structured", "StructuredOutputs", "response_format_of"]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Structured(Protocol):
    """A body with the fields about an answer's form."""

    response_format: dict[str, Any] | None
    structured_outputs: StructuredOutputs | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    json_schema: dict[str, Any] | str | None
    regex: str | None
    ebnf: str | None
    grammar: str | None


def response_format_of(body: Structured) -> dict[str, Any] | None:
    """Return the one of these fields that is set as a `response_format`. Raises ApiError for two of them."""
    inner = body.structured_outputs or StructuredOutputs()
    schema, regex, choice, grammar = "json_schema", "regex", "choice", "grammar"
    found = [
        (name, {"type": kind, kind: value})
        for name, kind, value in (
            ("guided_json", schema, _wrapped(body.guided_json)),
            ("json_schema", schema, _wrapped(body.json_schema)),
            ("structured_outputs", schema, _wrapped(inner.json)),
            ("guided_regex", regex, body.guided_regex),
            ("regex", regex, body.regex),
            ("structured_outputs", regex, inner.regex),
            ("guided_choice", choice, body.guided_choice),
            ("structured_outputs", choice, inner.choice),
            ("guided_grammar", grammar, body.guided_grammar),
            ("ebnf", grammar, body.ebnf),
            ("grammar", grammar, body.grammar),
            ("structured_outputs", grammar, inner.grammar),
        )
        if value is not None and value != ""
    ]
    if inner.json_object:
        found.append(("structured_outputs", {"type": "json_object"}))
    if body.response_format is not None and body.response_format.get("type") != "text":
        found.append(("response_format", body.response_format))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(
            400, f"The answer cannot be held to {names} at once. Send one.", code="invalid_value", param=found[1][0]
        )
    return found[0][1] if found else None


def _wrapped(schema: dict[str, Any] | str | None) -> dict[str, Any] | None:
    return None if schema is None or schema == "" else {"schema": schema}
