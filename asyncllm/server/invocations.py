"""POST /invocations, the one route of Amazon SageMaker: the route that is meant follows from the body, as in vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.routing import Handler
from asyncllm.server.openai.chat import chat_completions
from asyncllm.server.openai.completions import completions
from asyncllm.server.openai.embeddings import embeddings
from asyncllm.server.openai.scores import classify, rerank, score
from asyncllm.server.request.decode import BODY, read_body_of
from asyncllm.server.service import service_of

__all__ = ["Invocation", "invocations"]


class Invocation(msgspec.Struct, kw_only=True):
    """The body of POST /invocations: that of the route that takes the first of these fields. It may have others."""

    messages: Any = None
    """/v1/chat/completions; /classify or /v1/embeddings if the model writes no answers."""
    prompt: Any = None
    """/v1/completions."""
    input: Any = None
    """/v1/embeddings, or /classify if the model has labels and writes no answers."""
    text_1: Any = None
    """/v1/score, as has `queries`."""
    queries: Any = None
    query: Any = None
    """/v1/rerank."""


async def invocations(request: web.Request) -> web.StreamResponse:
    """Answer as the route does that takes such a body: with `messages` /v1/chat/completions, with `prompt`
    /v1/completions, with `input` /v1/embeddings or /classify, with `text_1` or `queries` /v1/score, with `query`
    /v1/rerank."""
    service = service_of(request)
    request[BODY] = await read_body_of(request)
    try:
        found = msgspec.json.decode(request[BODY], type=Invocation)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = Invocation()
    limits = service.engine.limits
    vectors = classify if limits.labels and not limits.has_head else embeddings
    routes: list[tuple[Any, Handler]] = [
        (found.messages, chat_completions if limits.has_head else vectors),
        (found.prompt, completions),
        (found.input, vectors),
        (found.text_1, score),
        (found.queries, score),
        (found.query, rerank),
    ]
    handler = next((each for value, each in routes if value is not None), None)
    if handler is None:
        names = ", ".join(Invocation.__struct_fields__)
        raise ApiError(
            400, f"The body has none of {names}, which say what is asked.", code="missing_required_parameter"
        )
    return await handler(request)
