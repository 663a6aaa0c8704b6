"""LMDeploy's POST /generate: takes a prompt or token ids, returns text and token ids."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import UNSET

from asyncllm.config import RequestKeywords
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode
from asyncllm.server.lmdeploy.requests import GenerateRequest
from asyncllm.server.lmdeploy.responses import FinishReason, GenerateMeta, GenerateResponse
from asyncllm.server.openai.answers import size_of
from asyncllm.server.request.arguments import generate_config, image_options, label_of, request_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.media import images_of
from asyncllm.server.service import service_of
from asyncllm.server.sglang.generate import generate_sglang, is_sglang
from asyncllm.server.sse import event, stream
from asyncllm.types import Chunk, Response

__all__ = ["generate"]


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue a prompt without a chat template. The answer has token ids and their log-probabilities. With `text` or
    `sampling_params`, body and answer have SGLang's form: several prompts or `n` have a list of answers, and an event
    of a stream has the whole text so far."""
    service = service_of(request)
    body = await read_request(request, GenerateRequest)
    if is_sglang(body):
        return await generate_sglang(request, body)
    if (body.prompt is None) == (body.input_ids is None):
        raise ApiError(400, "Send either prompt or input_ids.", code="invalid_value", param="prompt")
    options: RequestKeywords = {**request_options(request, body), **image_options(body)}
    prompt, ids = await _asked(request, body), [each for each in body.input_ids or () if isinstance(each, int)]
    if body.add_special_tokens is False and isinstance(prompt, str):
        encoded: Any = await service.engine.encode([prompt], do_preprocess=False, add_bos=False, bounded=True)
        prompt, ids = None, encoded[0]
    generation = service.engine.generate(
        prompt,
        generate_config(body, service.defaults),
        do_preprocess=False,
        input_ids=ids or None,
        session_id=label_of(request, body.session_id),
        stream_response=body.stream,
        adapter_name=service.adapter_of(body.model),
        **options,
    )
    await generation.start()
    if body.stream:
        return await stream(request, service, [generation], _GenerateEvents())
    try:
        response = await generation.response()
    finally:
        generation.cancel()
    return await built_response(service.engine, lambda: _answer(response), size_of(response))


async def _asked(request: web.Request, body: GenerateRequest) -> str | tuple[str, Any] | None:
    """Return the prompt, with its images if it has any, or None if the body has `input_ids`. Raises ApiError."""
    images = await images_of(request, body.image_data)
    if not images:
        return body.prompt
    if body.prompt is None:
        raise ApiError(400, "image_data goes with a prompt of text.", code="invalid_value", param="image_data")
    if body.add_special_tokens is False:
        raise ApiError(
            400,
            "add_special_tokens: false is for a prompt of text alone.",
            code="invalid_value",
            param="add_special_tokens",
        )
    return body.prompt, images


def _answer(piece: Chunk | Response) -> GenerateResponse:
    logprobs = piece.logprobs
    return GenerateResponse(
        text=piece.text,
        output_ids=piece.token_ids,
        meta_info=GenerateMeta(
            prompt_tokens=piece.input_token_len,
            completion_tokens=piece.generate_token_len,
            cached_tokens=piece.cached_token_len,
            finish_reason=FinishReason(type=piece.finish_reason) if piece.finish_reason is not None else None,
            # The chosen token comes first in an entry.
            output_token_logprobs=(
                UNSET if logprobs is None else [(value, token) for entry in logprobs for token, value in entry.items()]
            ),
        ),
    )


class _GenerateEvents:
    """One event per chunk, each in the format of the whole answer."""

    def chunk(self, chunk: Chunk) -> bytes:
        return event(encode(_answer(chunk)))

    def size(self, chunk: Chunk) -> int:
        return size_of(chunk)

    def closing(self) -> bytes:
        return b""
