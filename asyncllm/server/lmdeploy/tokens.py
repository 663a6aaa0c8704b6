"""POST /tokenize, /detokenize and /v1/encode: texts and conversations to token ids and back. POST /get_ppl: the
perplexity of a text."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.lmdeploy.requests import DetokenizeRequest, EncodeRequest, PerplexityRequest, TokenizeRequest
from asyncllm.server.lmdeploy.responses import (
    DetokenizeResponse,
    EncodeResponse,
    PerplexityResponse,
    TokenizeResponse,
)
from asyncllm.server.request.arguments import request_options, template_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.history import normalised
from asyncllm.server.service import service_of

__all__ = ["detokenize", "encode_texts", "get_ppl", "tokenize"]


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text, encoded verbatim, or of a conversation, encoded as a chat."""
    service = service_of(request)
    body = await read_request(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either prompt or messages.", code="invalid_value", param="prompt")
    prompt: Any = body.prompt if body.messages is None else await normalised(request, body.messages)
    options = template_options(body, service.template_for(body.model))
    if body.tools:
        options["tools"] = body.tools
    encoded: Any = await service.engine.encode(
        [prompt],
        do_preprocess=body.messages is not None,
        add_bos=body.add_special_tokens is not False,
        adapter_name=service.adapter_of(body.model),
        **options,
    )
    ids = encoded[0]
    spell = service.engine.tokenizer.token_text
    answer = TokenizeResponse(count=len(ids), max_model_len=service.engine.session_len, tokens=ids)
    if body.return_token_strs:
        answer.token_strs = await service.engine.offload(lambda: [spell(token) for token in ids], len(ids))
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    body = await read_request(request, DetokenizeRequest)
    return json_response(DetokenizeResponse(prompt=await service.engine.decode(body.tokens)))


async def encode_texts(request: web.Request) -> web.Response:
    """Token ids of one or several texts, in LMDeploy's format."""
    service = service_of(request)
    body = await read_request(request, EncodeRequest)
    if not 1 <= len(body.input) <= service.config.max_prompts and isinstance(body.input, list):
        raise ApiError(
            400,
            f"input holds {len(body.input)} texts. Send 1 to {service.config.max_prompts} in a request.",
            code="invalid_value",
            param="input",
        )
    ids: Any = await service.engine.encode(
        body.input,
        do_preprocess=body.do_preprocess,
        add_bos=body.add_bos,
        adapter_name=service.adapter_of(body.model),
    )
    length = len(ids) if isinstance(body.input, str) else [len(each) for each in ids]
    return json_response(EncodeResponse(input_ids=ids, length=length))


async def get_ppl(request: web.Request) -> web.Response:
    """The mean cross-entropy of a text's tokens after the first, as LMDeploy's route gives it."""
    service = service_of(request)
    body = await read_request(request, PerplexityRequest)
    adapter = service.adapter_of(body.model)
    ids: Any = body.input
    if isinstance(ids, str):
        ids = await service.engine.encode(ids, do_preprocess=False, bounded=True, adapter_name=adapter)
    ppl = await service.engine.get_ppl(ids, adapter_name=adapter, **request_options(request, body))
    return json_response(PerplexityResponse(ppl=ppl))
