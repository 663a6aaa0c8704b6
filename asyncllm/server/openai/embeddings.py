"""POST /v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

from aiohttp import web

from asyncllm import types
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encoded_alone
from asyncllm.server.openai.inputs import pooled_inputs
from asyncllm.server.openai.requests import EmbeddingRequest
from asyncllm.server.openai.responses import Embedding, EmbeddingResponse, EmbeddingUsage
from asyncllm.server.request.arguments import request_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.service import service_of

__all__ = ["embeddings"]


async def embeddings(request: web.Request) -> web.Response:
    """The vector of each input: the hidden state of its last token, or the mean of all, scaled to length 1. The
    checkpoint's own files override this default, and the request's `pooling` and `normalize` override both."""
    service = service_of(request)
    body = await read_request(request, EmbeddingRequest)
    normalize = body.use_activation if body.normalize is None else body.normalize
    if body.use_activation not in (None, normalize):
        raise ApiError(
            400,
            "normalize and use_activation contradict each other. Send one.",
            code="invalid_value",
            param="use_activation",
        )
    found = await service.engine.embed(
        await pooled_inputs(request, body),
        pooling=body.pooling,
        normalize=normalize,
        dimensions=body.dimensions,
        adapter_name=service.adapter_of(body.model),
        **request_options(request, body),
    )
    vectors: Sequence[types.Embedding] = found if isinstance(found, list) else [found]
    tokens = sum(each.input_token_len for each in vectors)
    packs = body.encoding_format == "base64"

    def build() -> EmbeddingResponse:
        data = [
            encoded_alone(Embedding(index=index, embedding=_packed(each.values) if packs else each.values))
            for index, each in enumerate(vectors)
        ]
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        return EmbeddingResponse(data=data, model=body.model or service.engine.model_name, usage=usage)

    return await built_response(service.engine, build, sum(len(each.values) for each in vectors))


def _packed(values: Sequence[float]) -> str:
    """Return the values as little-endian float32 in base64, which OpenAI's client requests by default."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
