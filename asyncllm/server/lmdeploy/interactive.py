"""LMDeploy's POST /v1/chat/interactive: conversations that the server keeps under ids chosen by the client."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from asyncllm.config import RequestKeywords
from asyncllm.server.http.access import KEY
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import encode, json_response
from asyncllm.server.lmdeploy.requests import InteractiveRequest
from asyncllm.server.lmdeploy.responses import InteractiveResponse
from asyncllm.server.request.arguments import (
    engine_session_id,
    image_options,
    interactive_config,
    label_of,
    request_options,
)
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.history import normalised
from asyncllm.server.request.media import image_parts
from asyncllm.server.service import Service, service_of
from asyncllm.server.sse import NDJSON, stream
from asyncllm.types import Chunk, Response

__all__ = ["chat_interactive"]


async def chat_interactive(request: web.Request) -> web.StreamResponse:
    """Answer the next turn of a kept conversation, stop its answer, or end it.

    `interactive_mode: true` keeps the conversation for the next request with the same session_id. `false` ends it,
    after a last answer if there is a prompt. `cancel: true` stops the running answer.
    """
    service = service_of(request)
    body = await read_request(request, InteractiveRequest)
    if body.session_id == -1 and (body.cancel or body.interactive_mode):
        what = "cancel" if body.cancel else "interactive_mode"
        raise ApiError(400, f"{what} needs a session_id, any number from 0.", code="invalid_value", param="session_id")
    if body.cancel:
        return await _cancel(request, service, body)
    if not body.prompt:
        if body.interactive_mode or body.session_id == -1:
            raise ApiError(400, "The prompt is empty. Send some text.", code="invalid_value", param="prompt")
        tokens = service.sessions.end(request[KEY], body.session_id)
        return json_response(InteractiveResponse(history_tokens=tokens, finish_reason="stop"))
    return await _turn(request, service, body)


async def _cancel(request: web.Request, service: Service, body: InteractiveRequest) -> web.Response:
    if body.prompt:
        raise ApiError(
            400,
            "cancel stops an answer and takes no prompt. Leave the prompt out.",
            code="invalid_value",
            param="prompt",
        )
    kept = service.sessions.get(request[KEY], body.session_id)
    if kept is not None:
        await service.engine.stop_session(kept.session.id)
    # Chats and completions use the id as a label.
    await service.engine.stop_session(engine_session_id(request, body.session_id))
    history = kept.session.step if kept is not None else 0
    return json_response(InteractiveResponse(history_tokens=history, finish_reason="stop"))


async def _turn(request: web.Request, service: Service, body: InteractiveRequest) -> web.StreamResponse:
    config = interactive_config(body)
    adapter = service.adapter_of(body.model)
    if body.adapter_name is not None:
        if adapter not in (None, body.adapter_name):
            raise ApiError(
                400, "model and adapter_name name two adapters. Send one.", code="invalid_value", param="adapter_name"
            )
        service.check_model(body.adapter_name)
        adapter = service.adapter_of(body.adapter_name)
    options: RequestKeywords = {**request_options(request, body), **image_options(body), "separate_reasoning": False}
    prompt = await normalised(request, _asked(body))
    kept = None
    if body.session_id != -1:
        kept = service.sessions.enter(request[KEY], body.session_id, start=body.interactive_mode)
    generation = service.engine.generate(
        prompt,
        config,
        session_id=kept.session.id if kept is not None else label_of(request, body.session_id),
        sequence_start=kept is None,
        sequence_end=not body.interactive_mode,
        step=body.step,
        stream_response=body.stream,
        adapter_name=adapter,
        **options,
    )
    ends = False
    try:
        await generation.start()
        ends = not body.interactive_mode
        if body.stream:
            return await stream(request, service, [generation], _Lines(), NDJSON)
        return json_response(_answer(await generation.response()))
    finally:
        generation.cancel()
        if kept is not None:
            service.sessions.leave(request[KEY], body.session_id, kept, end=ends)


def _asked(body: InteractiveRequest) -> list[dict[str, Any]] | str:
    """Return the prompt with the images of `image_url` before its text. Raises ApiError."""
    images = image_parts(body.image_url)
    if not images:
        return body.prompt
    if not isinstance(body.prompt, str):
        raise ApiError(
            400,
            "image_url goes with a prompt of text. Put images of messages among their parts.",
            code="invalid_value",
            param="image_url",
        )
    return [{"role": "user", "content": [*images, {"type": "text", "text": body.prompt}]}]


def _answer(piece: Chunk | Response) -> InteractiveResponse:
    return InteractiveResponse(
        text=piece.text,
        tokens=piece.generate_token_len,
        input_tokens=piece.input_token_len,
        history_tokens=piece.history_token_len,
        finish_reason=piece.finish_reason,
    )


class _Lines:
    """One line per chunk, each in the format of the whole answer."""

    def chunk(self, chunk: Chunk) -> bytes:
        return NDJSON.frame(encode(_answer(chunk)))

    def size(self, chunk: Chunk) -> int:
        return 0

    def closing(self) -> bytes:
        return b""
