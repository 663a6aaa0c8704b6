"""GET /openapi.json: the route table as OpenAPI 3.1, so that documentation and server agree.

The server accepts every body that the document allows, as far as a schema can express it: an unsupported parameter is
listed with its neutral values, and bounds are those of this server and its model.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import msgspec
from aiohttp import web

from asyncllm import __version__
from asyncllm.config import MAX_LOGIT_BIAS, GenerationConfig
from asyncllm.config.unsupported import Unsupported
from asyncllm.server.docs.field_notes import field_notes
from asyncllm.server.http.access import Auth
from asyncllm.server.http.errors import NAMES
from asyncllm.server.http.routing import Route
from asyncllm.server.openai.requests import CompletionRequest, OpenAIFields
from asyncllm.server.request.arguments import COMPLETION_TOKENS
from asyncllm.server.request.fields import Body, Prompt, SamplingFields
from asyncllm.server.request.structure import Structured
from asyncllm.server.request.unsupported import UNSUPPORTED
from asyncllm.server.service import Service, service_of, table_of
from asyncllm.text.chat_template import ChatTemplate

__all__ = ["document_of", "openapi_json"]

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
PATH_PARAMETER = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose defaults the checkpoint may set."""

GROUPS = {
    "v1": "Answers and models",
    "api": "Ollama",
    "health": "Watching",
    "health_generate": "Watching",
    "is_sleeping": "Watching",
    "is_paused": "Watching",
    "server_info": "Watching",
    "get_server_info": "Watching",
    "metrics": "Watching",
    **dict.fromkeys(
        ("sleep", "wakeup", "wake_up", "pause", "resume", "reset_prefix_cache", "flush_cache"), "Administration"
    ),
    "openapi.json": "Documentation",
    "": "Documentation",
}
"""Path prefix -> tag."""

ENGINE_NAMES = {name: engine_name for engine_name, name in NAMES.items()} | {"max_completion_tokens": "max_new_tokens"}
"""Field without a docstring -> the engine's setting with the same meaning, which has one."""

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, why, and what to do."},
                "type": {"type": "string", "description": "The class of errors, by the status."},
                "param": {"type": ["string", "null"], "description": "The field that is to blame."},
                "code": {"type": ["string", "null"], "description": "Which error it is, for programs."},
            },
        }
    },
}

FLAT_ERROR: Schema = {
    "type": "object",
    "required": ["object", "message", "type", "param", "code"],
    "properties": {
        "object": {"const": "error"},
        **ERROR["properties"]["error"]["properties"],
        "code": {"type": "integer", "description": "The status."},
    },
}
"""The error body with `error_format="lmdeploy"`."""

ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {key: ERROR["properties"]["error"]["properties"][key] for key in ("type", "message")},
        },
    },
}
"""The error body of Anthropic's routes."""

OLLAMA_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": ERROR["properties"]["error"]["properties"]["message"]},
}
"""The error body of Ollama's routes."""

OWN_ERRORS = {"anthropic": ("AnthropicError", ANTHROPIC_ERROR), "ollama": ("OllamaError", OLLAMA_ERROR)}
"""Error format of a group of routes -> its schema's name and the schema."""

GIVEN: Schema = {"not": {"type": "null"}}

ERRORS = {
    "400": "Something in the request is wrong; `param` says what.",
    "401": "The key is missing or wrong.",
    "403": "The Host or the Origin is not let in.",
    "404": "There is no such model or response.",
    "408": "The body did not arrive in time.",
    "409": "The session has a turn running.",
    "413": "The body is too large.",
    "415": "The body's Content-Encoding is not known.",
    "429": "The server is full; Retry-After says when to come back.",
    "500": "This request failed inside the engine.",
    "503": "The server is shutting down, its model sleeps, or its engine has died and is perhaps being restarted.",
    "504": "The request's own timeout is over.",
}
WITH_BODY = ("400", "404", "408", "409", "413", "415", "500", "504")

STREAMS = {
    "text/event-stream": "With `stream: true`: lines `data: {...}`, each a chunk, the last one `data: [DONE]`; the "
    "events of Responses and Messages have names, and an end of their own.",
    "application/x-ndjson": "With `stream: true`: lines of JSON, each a chunk.",
}


def _message(roles: list[str], min_size: int) -> Schema:
    text: Schema = {"type": "string", "minLength": min_size}
    part = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": text}}
    return {
        "type": "object",
        "required": ["role", "content"],
        "additionalProperties": False,
        "properties": {
            "role": {"enum": roles},
            "content": {"anyOf": [text, {"type": "array", "minItems": min_size, "items": part}]},
            "name": {"type": ["string", "null"]},
        },
    }


STRUCTURE = frozenset(Structured.__annotations__)
"""Fields that constrain the form of an answer."""

TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": r"^[A-Za-z0-9_.-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
"""A callable function. No two may have the same name, which a schema cannot express."""

CUSTOM_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "custom"},
        "custom": {
            "type": "object",
            "properties": {
                "name": TOOL["properties"]["function"]["properties"]["name"],
                "description": {"type": "string"},
                "format": {"const": {"type": "text"}},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "custom"],
}
"""A tool that is called with a text. Regular expressions, which its format may have too, are not all accepted."""

MESSAGE: Schema = {
    "anyOf": [
        _message(["user"], 1),
        _message(["system", "developer", "assistant", "tool", "function"], 0),
    ]
}
"""Only a user message must have content."""


async def openapi_json(request: web.Request) -> web.Response:
    """This server's routes as an OpenAPI 3.1 document."""
    service = service_of(request)
    if not service.openapi:
        # Takes a tenth of a second, and reads source files for the fields' notes.
        await asyncio.to_thread(_write, table_of(request), service)
    return web.Response(body=service.openapi, content_type="application/json")


def _write(routes: list[Route], service: Service) -> None:
    service.openapi = msgspec.json.encode(document_of(routes, service))


def document_of(routes: Iterable[Route], service: Service) -> Schema:
    """Return the document of these routes, for a started engine."""
    routes = list(routes)
    kinds = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    for kind in _all_structs(kinds):
        if kind.__name__ in components:
            _describe(components[kind.__name__], kind, service)
    components["Error"] = FLAT_ERROR if service.config.error_format == "lmdeploy" else ERROR
    components |= dict(OWN_ERRORS[route.errors] for route in routes if route.errors in OWN_ERRORS)
    components["Message"] = MESSAGE
    names: set[str] = set()
    paths: Schema = {}
    for route in routes:
        words = re.findall(r"\w+", route.path)
        candidates = (route.handler.__name__, "_".join(words), "_".join([route.method.lower(), *words]))
        name = next(each for each in candidates if each not in names)
        names.add(name)
        operations = paths.setdefault(PATH_PARAMETER.sub(r"{\1}", route.path), {})
        operations[route.method.lower()] = _operation(route, name, service)
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "asyncllm",
            "version": __version__,
            "description": f"{service.engine.model_name}, served by asyncllm.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if service.access.num_keys or service.access.has_admin:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(route: Route, name: str, service: Service) -> Schema:
    text = " ".join((inspect.getdoc(route.handler) or "").split())
    operation: Schema = {
        "operationId": name,
        "summary": re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0].rstrip(".:;"),
        "description": text,
        "tags": [GROUPS.get(route.path.split("/")[1], "More routes")],
        "responses": _responses(route, service),
    }
    parameters: list[Schema] = [
        {
            "name": each,
            "in": "path",
            "required": True,
            "schema": {"enum": [service.engine.model_name]} if each == "id" else {"type": "string"},
        }
        for each in PATH_PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": REF.format(name=route.body.__name__)}}},
        }
    if service.access.num_keys or route.auth is Auth.ADMIN:
        operation["security"] = [{"bearer": []}] if route.auth is not Auth.PUBLIC else []
    return operation


def _responses(route: Route, service: Service) -> Schema:
    content: Schema = {}
    if route.answer is not None:
        content["application/json"] = {"schema": {"$ref": REF.format(name=route.answer.__name__)}}
    elif route.content_type is not None:
        content[route.content_type] = {"schema": {"type": "string"} if "json" not in route.content_type else {}}
    if route.streams:
        content[route.stream_type] = {"schema": {"description": STREAMS[route.stream_type]}}
    error_name, _ = OWN_ERRORS.get(route.errors or "", ("Error", ERROR))
    error = {"application/json": {"schema": {"$ref": REF.format(name=error_name)}}}
    statuses = {"403"}
    if route.body is not None:
        statuses |= {*WITH_BODY}
    if PATH_PARAMETER.search(route.path):
        statuses.add("404")
    if route.auth is Auth.ADMIN or (route.auth is not Auth.PUBLIC and service.access.num_keys):
        statuses.add("401")
    if route.query:
        statuses.add("400")
    if route.auth is Auth.ADMIN:
        statuses.add("503")
    if route.work:
        statuses |= {"429", "503"}
    responses: Schema = {"200": {"description": "The answer.", "content": content}}
    for status in sorted(statuses):
        responses[status] = {"description": ERRORS[status], "content": error}
    for also in route.also:
        responses[str(also)] = {"description": "The answer is no.", "content": content}
    responses["default"] = {"description": "Whatever else is wrong.", "content": error}
    return responses


def _all_structs(kinds: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """Return the Structs and those nested in their fields."""
    found: dict[Any, None] = {}

    def look(type_: Any) -> None:
        match type_:
            case msgspec.inspect.StructType() if type_.cls not in found:
                found[type_.cls] = None
                for field in type_.fields:
                    look(field.type)
            case msgspec.inspect.UnionType():
                for each in type_.types:
                    look(each)
            case msgspec.inspect.ListType():
                look(type_.item_type)
            case msgspec.inspect.DictType():
                look(type_.value_type)

    for kind in kinds:
        look(msgspec.inspect.type_info(kind))
    return list(found)


def _describe(schema: Schema, kind: type[msgspec.Struct], service: Service) -> None:
    """Add what msgspec does not know: descriptions, supported values, and this server's bounds."""
    properties: Schema = schema.get("properties", {})
    notes, hints = field_notes(kind), get_type_hints(kind)
    settings = _setting_notes()
    is_request = kind.__struct_config__.forbid_unknown_fields
    for name, field in properties.items():
        if name in notes:
            field["description"] = notes[name]
        elif is_request and not any("description" in each for each in (field, *field.get("anyOf", ()))):
            field.update(settings.get(ENGINE_NAMES.get(name, name), {}))
        if field.get("default", ...) is None:
            # The absence of a value, which the field's description explains.
            del field["default"]
        if not is_request:
            continue
        _bound(name, field, hints.get(name), service, kind)
    if issubclass(kind, Body):
        for name, unsupported in UNSUPPORTED.items():
            # Fields that control generation do not apply to routes that generate nothing.
            if name not in properties and (issubclass(kind, SamplingFields) or unsupported.values is None):
                properties[name] = _not_implemented(unsupported)
    if issubclass(kind, OpenAIFields):
        for name in DEFAULTS:
            properties[name]["default"] = getattr(service.defaults, name)
        schema["allOf"] = [_only_with("stream_options", GIVEN, "stream")]
        if "top_logprobs" in properties:
            schema["allOf"].append(_only_with("top_logprobs", {"minimum": 1, "type": "integer"}, "logprobs"))
        if issubclass(kind, CompletionRequest):
            if not service.engine.limits.takes_embeddings:
                schema["required"] = ["prompt", *schema.get("required", ())]
            properties["max_tokens"]["default"] = COMPLETION_TOKENS
            _alternative(properties["max_tokens"], "integer")["minimum"] = 0
            schema["allOf"].append(_only_with("max_tokens", {"const": 0}, "echo"))


def _not_implemented(unsupported: Unsupported) -> Schema:
    if unsupported.values is None:
        return {"description": f"Accepted, and without effect. {unsupported.why}", "x-support": "ignored"}
    values = _distinct((None, *unsupported.values))
    return {"enum": values, "description": f"Not supported. {unsupported.why}", "x-support": "refused"}


def _setting_notes() -> dict[str, Schema]:
    """Return the description of each setting of GenerationConfig, as part of a schema."""
    _, components = msgspec.json.schema_components([GenerationConfig])
    notes = {}
    for name, field in components["GenerationConfig"]["properties"].items():
        for each in (field, *field.get("anyOf", ())):
            if "description" in each:
                notes[name] = {"description": each["description"].replace("None", "null")}
    return notes


def _templates(service: Service) -> list[ChatTemplate]:
    """Return the chat templates of the model and its adapters."""
    return [service.engine.chat_template_of(name) for name in (None, *service.engine.adapters)]


def _bound(name: str, field: Schema, hint: Any, service: Service, kind: type[msgspec.Struct]) -> None:
    """Narrow the schema of a field of the request `kind` to what this server accepts."""
    limits, config = service.engine.limits, service.config
    token: Schema = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    if name == "model":
        field["anyOf"] = [{"enum": [service.engine.model_name, *service.engine.adapters]}, {"type": "null"}]
    elif name in STRUCTURE and not limits.takes_grammars:
        plain: Schema = {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}
        field["anyOf"] = [*([plain] if name == "response_format" else []), {"type": "null"}]
    elif name == "tools":
        _alternative(field, "array").update(
            items={"anyOf": [TOOL, CUSTOM_TOOL]} if issubclass(kind, OpenAIFields) else {"type": "object"}
        )
        if not any(template.reads_tools for template in _templates(service)):
            _alternative(field, "array")["maxItems"] = 0
    elif name == "tool_choice" and str in get_args(hint):
        words = ["none", "auto", "required"] if limits.takes_grammars else ["none", "auto"]
        named = [{"type": "object", "required": ["type"]}] if limits.takes_grammars else []
        field["anyOf"] = [{"enum": words}, *named, {"type": "null"}]
    elif name == "reasoning_effort" and not any(name in template.variables for template in _templates(service)):
        field["anyOf"] = [{"enum": ["none"]}, {"type": "null"}]
    elif _alternative(field, "array").get("items") == {"type": "object"}:
        _alternative(field, "array").update(minItems=1, items={"$ref": REF.format(name="Message")})
        if name == "messages" and "string" in (each["type"] for each in field.get("anyOf", ())):
            _alternative(field, "string")["minLength"] = 1
            field["description"] = "The conversation; a text is one user message."
    elif name == "prompt_embeds" and not limits.takes_embeddings:
        field["anyOf"] = [{"type": "null"}]
    elif hint == Prompt or (name == "prompt" and hint == Prompt | None):
        text: Schema = {"type": "string", "minLength": 1}
        tokens: Schema = {"type": "array", "items": token, "minItems": 1}
        several: Schema = {"type": "array", "minItems": 1, "maxItems": config.max_prompts}
        field["anyOf"] = [text, {**several, "items": text}, tokens, {**several, "items": tokens}]
    elif name == "n":
        _alternative(field, "integer")["maximum"] = config.max_choices
    elif name in ("max_tokens", "max_new_tokens", "request_output_len"):
        _alternative(field, "integer")["minimum"] = 1
    elif name == "stop_token_ids":
        _alternative(field, "array")["items"] = token
    elif name == "logit_bias":
        _alternative(field, "object").update(
            propertyNames={"pattern": _digits_up_to(limits.vocab_size - 1)}, maxProperties=MAX_LOGIT_BIAS
        )


def _alternative(field: Schema, type_: str) -> Schema:
    """Return the part of a field's schema that covers values of this type."""
    return next((each for each in field.get("anyOf", ()) if each.get("type") == type_), field)


def _digits_up_to(last: int) -> str:
    """Return a regular expression that matches the whole numbers from 0 to `last`."""
    digits = str(last)
    forms = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}", digits] if len(digits) > 1 else [f"[0-{digits}]"]
    for index, digit in enumerate(digits if len(digits) > 1 else ""):
        first = 0 if index else 1
        if int(digit) > first:
            forms.append(f"{digits[:index]}[{first}-{int(digit) - 1}][0-9]{{{len(digits) - index - 1}}}")
    return f"^({'|'.join(forms)})$"


def _only_with(name: str, value: Schema, switch: str) -> Schema:
    """Return the condition that `switch` is true if `name` has such a value."""
    return {
        "if": {"required": [name], "properties": {name: value}},
        "then": {"required": [switch], "properties": {switch: {"const": True}}},
    }


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values of an enum without duplicates. JSON treats 1 and 1.0 as equal."""
    kept: list[Any] = []
    for value in values:
        if not any(type(value) is not bool and type(each) is not bool and value == each for each in kept):
            kept.append(value)
    return kept
