"""The grammar of an answer, in the spellings of OpenAI, LMDeploy, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from asyncllm.server.http.errors import ApiError

__all__ = ["Structured", "StructuredOutputs", "only_format", "response_format_of", "sampling_format"]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    """The white space allowed between JSON's tokens."""
    disable_any_whitespace: bool | None = None
    """true: nothing."""
    disable_fallback: bool | None = None
    """Changes nothing: there is one back end."""
    disable_additional_properties: bool | None = None
    """Changes nothing: an object that names its properties has no others, unless the schema says so."""
    structural_tag: dict[str, Any] | str | None = None


class Structured(Protocol):
    """A body with the fields about an answer's form."""

    response_format: dict[str, Any] | None
    structured_outputs: StructuredOutputs | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None
    json_schema: dict[str, Any] | str | None
    regex: str | None
    ebnf: str | None
    grammar: str | None


def response_format_of(body: Structured) -> dict[str, Any] | None:
    """Return the one of these fields that is set, as a `response_format`. Raises ApiError for two of them."""
    fields = (
        ("guided_json", "json_schema", _wrapped(body.guided_json)),
        ("json_schema", "json_schema", _wrapped(body.json_schema)),
        ("guided_regex", "regex", body.guided_regex),
        ("regex", "regex", body.regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("ebnf", "grammar", body.ebnf),
        ("grammar", "grammar", body.grammar),
    )
    return only_format(
        body.structured_outputs,
        *[(name, _format(kind, value)) for name, kind, value in fields],
        ("response_format", body.response_format),
        white_space=body.guided_whitespace_pattern,
    )


class Sampled(Protocol):
    """SGLang's sampling parameters about an answer's form."""

    json_schema: dict[str, Any] | str | None
    regex: str | None
    ebnf: str | None
    structural_tag: dict[str, Any] | str | None


def sampling_format(params: Sampled) -> dict[str, Any] | None:
    """Return the one of these parameters that is set, as a `response_format`. Raises ApiError for two of them."""
    return only_format(
        None,
        ("json_schema", _format("json_schema", _wrapped(params.json_schema))),
        ("regex", _format("regex", params.regex)),
        ("ebnf", _format("grammar", params.ebnf)),
        ("structural_tag", _format("structural_tag", params.structural_tag)),
    )


def only_format(
    outputs: StructuredOutputs | None,
    *fields: tuple[str, dict[str, Any] | None],
    white_space: str | None = None,
) -> dict[str, Any] | None:
    """Return the one form that `outputs` or a field asks for, as a `response_format`. Raises ApiError for two of them.

    `fields`: name and form; None or the type text: none. `white_space`: guided_whitespace_pattern.
    """
    inner = outputs or StructuredOutputs()
    asked_for = (("json_schema", _wrapped(inner.json)), ("regex", inner.regex), ("choice", inner.choice))
    further = (("grammar", inner.grammar), ("structural_tag", inner.structural_tag))
    forms = [_format(kind, value) for kind, value in (*asked_for, *further)]
    forms.append({"type": "json_object"} if inner.json_object else None)
    every = [*(("structured_outputs", form) for form in forms), *fields]
    found = [(name, form) for name, form in every if form is not None and form.get("type") != "text"]
    white_space, asked_by = _white_space(white_space, inner)
    if len(found) > 1:
        names = " and ".join(f"{name} ({asked['type']})" for name, asked in found)
        raise ApiError(
            400, f"The answer cannot be held to {names} at once. Send one.", code="invalid_value", param=found[1][0]
        )
    asked = found[0][1] if found else None
    if white_space is None:
        return asked
    if asked is None or asked.get("type") not in ("json_schema", "json_object"):
        raise ApiError(
            400,
            f"{asked_by} is about the white space between JSON's tokens, and the answer is held to no schema. Send "
            f"one, or leave white space out.",
            code="invalid_value",
            param=asked_by,
        )
    return {"whitespace_pattern": white_space, **asked}


def _white_space(guided: str | None, inner: StructuredOutputs) -> tuple[str | None, str]:
    """Return the expression of white space between JSON's tokens, if given, and the field that gives it."""
    if inner.disable_any_whitespace:
        return "", "structured_outputs"
    if inner.whitespace_pattern is not None:
        return inner.whitespace_pattern, "structured_outputs"
    return guided, "guided_whitespace_pattern"


def _format(kind: str, value: Any) -> dict[str, Any] | None:
    return None if value is None or value == "" else {"type": kind, kind: value}


def _wrapped(schema: dict[str, Any] | str | None) -> dict[str, Any] | None:
    return None if schema is None or schema == "" else {"schema": schema}
