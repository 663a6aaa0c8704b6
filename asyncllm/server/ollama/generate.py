"""POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from asyncllm import types
from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode, json_response
from asyncllm.server.ollama.answers import AnswerWriter, OllamaLines, loaded
from asyncllm.server.ollama.messages import chat_message, messages_of
from asyncllm.server.ollama.requests import (
    AnswerFields,
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    config_of,
    options_of,
)
from asyncllm.server.openai.answers import size_of
from asyncllm.server.openai.inputs import prompts_of
from asyncllm.server.request.arguments import request_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.fill_in import filled_in
from asyncllm.server.request.media import with_images
from asyncllm.server.service import Service, service_of
from asyncllm.server.sse import NDJSON, stream

__all__ = ["OllamaEmbedding", "OllamaEmbeddings", "embed", "embed_one", "ollama_chat", "ollama_generate"]


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The vectors of some texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    """Nanoseconds."""
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    """The vector of a text."""

    embedding: list[float]


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation as Ollama does."""
    service = service_of(request)
    body = await read_request(request, OllamaChatRequest)
    if not body.messages:
        return _loaded(service, body, chats=True)
    options = options_of(request, body, service)
    if body.tools:
        options["tools"] = body.tools
    generation = service.engine.generate(
        await with_images(request, messages_of(body.messages)),
        config_of(body, service.defaults),
        stream_response=body.stream,
        adapter_name=service.adapter_of(body.model),
        **options,
    )
    return await _answer(request, service, body, generation, chats=True)


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    """Answer a prompt as Ollama does, continue it without a template (`raw`), or fill the gap between it and a
    `suffix`."""
    service = service_of(request)
    body = await read_request(request, OllamaGenerateRequest)
    if not body.prompt and not body.images:
        return _loaded(service, body, chats=False)
    plain, prompt, config = body.raw or bool(body.suffix), body.prompt or "", config_of(body, service.defaults)
    for name in ("system", "images", "think") if plain else ():
        if getattr(body, name):
            raise ApiError(
                400,
                f"{name} needs the chat template, which a prompt that is raw or has a suffix does not use. Leave one "
                f"of them out.",
                code="invalid_value",
                param=name,
            )
    if body.suffix:
        (prompt,), config = filled_in([prompt], body.suffix, config, service.engine.tokenizer)
    system = [chat_message("system", body.system)] if body.system else []
    messages: Any = [*system, chat_message("user", prompt, body.images or ())]
    generation = service.engine.generate(
        prompt if plain else await with_images(request, messages),
        config,
        do_preprocess=not plain,
        stream_response=body.stream,
        adapter_name=service.adapter_of(body.model),
        **(request_options(request, body) if plain else options_of(request, body, service)),
    )
    return await _answer(request, service, body, generation, chats=False)


def _loaded(service: Service, body: AnswerFields, *, chats: bool) -> web.Response:
    """Answer a request that asks to load the model, or refuse one that asks to unload it."""
    if body.keep_alive in (0, "0", "0s", "0m", "0h"):
        raise ApiError(
            400,
            "The model stays loaded as long as the server runs; its owner can call /sleep.",
            code="unsupported_parameter",
        )
    body_line = encode(loaded(body.model or service.engine.model_name, chats=chats))
    kind = NDJSON.content_type if body.stream else "application/json"
    return web.Response(body=NDJSON.frame(body_line), content_type=kind)


async def _answer(
    request: web.Request, service: Service, body: AnswerFields, generation: Generation, *, chats: bool
) -> web.StreamResponse:
    await generation.start()
    writer = AnswerWriter(
        body.model or service.engine.model_name,
        chats=chats,
        tokenizer=service.engine.tokenizer,
        top_logprobs=body.top_logprobs or 0,
    )
    if body.stream:
        lines = OllamaLines(writer, generation)
        return await stream(request, service, [generation], lines, NDJSON, lines.failed)
    try:
        response = await generation.response()
    finally:
        generation.cancel()
    return await built_response(service.engine, lambda: writer.whole(generation, response), size_of(response))


async def embed(request: web.Request) -> web.Response:
    """The vector of each text, as /v1/embeddings gives it."""
    began = time.monotonic()
    service = service_of(request)
    body = await read_request(request, EmbedRequest)
    vectors = await _vectors(request, service, body, body.input, body.dimensions)
    return json_response(
        OllamaEmbeddings(
            model=body.model or service.engine.model_name,
            embeddings=[each.values for each in vectors],
            total_duration=round((time.monotonic() - began) * 1e9),
            prompt_eval_count=sum(each.input_token_len for each in vectors),
        )
    )


async def embed_one(request: web.Request) -> web.Response:
    """The vector of one text, as /v1/embeddings gives it."""
    service = service_of(request)
    body = await read_request(request, EmbeddingsRequest)
    (vector,) = await _vectors(request, service, body, body.prompt, None)
    return json_response(OllamaEmbedding(embedding=vector.values))


async def _vectors(
    request: web.Request,
    service: Service,
    body: EmbedRequest | EmbeddingsRequest,
    texts: str | list[str],
    dimensions: int | None,
) -> list[types.Embedding]:
    inputs: Any = prompts_of(texts if isinstance(texts, str) else list(texts), service.config, "input")
    found = await service.engine.embed(
        inputs,
        dimensions=dimensions,
        adapter_name=service.adapter_of(body.model),
        **request_options(request, body),
    )
    return found if isinstance(found, list) else [found]
