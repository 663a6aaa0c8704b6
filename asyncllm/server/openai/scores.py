"""Routes of models that score sequences: /score, /rerank and /classify as in vLLM and Cohere, and LMDeploy's
/pooling."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.openai.inputs import kept_tokens, pooled_inputs, prompts_of, truncated
from asyncllm.server.openai.requests import (
    ClassifyRequest,
    Document,
    PooledFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from asyncllm.server.openai.responses import (
    ClassifyResponse,
    EmbeddingUsage,
    LabelProbabilities,
    PoolingResponse,
    RankedDocument,
    RerankResponse,
    Reward,
    Score,
    ScoreResponse,
)
from asyncllm.server.request.arguments import request_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.service import Service, service_of
from asyncllm.types import SequenceScores

__all__ = ["classify", "pooling", "rerank", "score"]


async def score(request: web.Request) -> web.Response:
    """The score of each pair of `text_1` and `text_2`, or of `queries` and `documents`. One `text_1` is paired with
    every `text_2`; otherwise texts at equal positions form a pair. The model reads both texts as one sequence, and its
    score is mapped to 0 to 1."""
    service = service_of(request)
    body = await read_request(request, ScoreRequest)
    one, first = _either(service, text_1=body.text_1, queries=body.queries)
    two, second = _either(service, text_2=body.text_2, documents=body.documents)
    if len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"{one} holds {len(first)} texts and {two} {len(second)}. Send one of {one}, or as many as of {two}.",
            code="invalid_value",
            param=one,
        )
    pairs = [(first[index % len(first)], text) for index, text in enumerate(second)]
    scores, tokens = await _scores_of_pairs(request, body, service, pairs)
    data = [Score(index=index, score=value) for index, value in enumerate(scores)]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return json_response(ScoreResponse(data=data, model=body.model or service.engine.model_name, usage=usage))


async def rerank(request: web.Request) -> web.Response:
    """The documents ordered by their score for the query, best first; only the first `top_n` if that is given."""
    service = service_of(request)
    body = await read_request(request, RerankRequest)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    _texts(texts, service, "documents")
    scores, tokens = await _scores_of_pairs(request, body, service, [(body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    results = [
        RankedDocument(
            index=index,
            relevance_score=scores[index],
            document=None if body.return_documents is False else Document(text=texts[index]),
        )
        for index in order[: body.top_n or len(order)]
    ]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    answer = RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}", results=results, model=body.model or service.engine.model_name, usage=usage
    )
    return json_response(answer)


async def classify(request: web.Request) -> web.Response:
    """The probability of each label for each input, and the likeliest by its name in the checkpoint's `id2label`. A
    model with one score has one label."""
    service = service_of(request)
    body = await read_request(request, ClassifyRequest)
    found = await _classified(request, body, service, await pooled_inputs(request, body))
    data = []
    for index, each in enumerate(found):
        probs = each.values if body.use_activation is False else _probabilities(each.values)
        best = max(range(len(probs)), key=probs.__getitem__)
        label = service.engine.limits.labels[best]
        data.append(LabelProbabilities(index=index, label=label, probs=probs, num_classes=len(probs)))
    tokens = sum(each.input_token_len for each in found)
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return json_response(ClassifyResponse(data=data, model=body.model or service.engine.model_name, usage=usage))


async def pooling(request: web.Request) -> web.Response:
    """The rewards of each input, as the model's head computes them."""
    service = service_of(request)
    body = await read_request(request, PoolingRequest)
    found = await _classified(request, body, service, await pooled_inputs(request, body))
    tokens = sum(each.input_token_len for each in found)
    answer = PoolingResponse(
        data=[Reward(index=index, data=each.values) for index, each in enumerate(found)],
        model=body.model or service.engine.model_name,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return json_response(answer)


def _either(service: Service, **fields: str | list[str] | None) -> tuple[str, list[str]]:
    """Return the name and the texts of the one field that is given. Raises ApiError."""
    found = [(name, given) for name, given in fields.items() if given is not None]
    if len(found) != 1:
        first, second = fields
        raise ApiError(400, f"Send either {first} or {second}.", code="invalid_value", param=first)
    name, given = found[0]
    return name, _texts(given, service, name)


def _texts(given: str | Sequence[str], service: Service, name: str) -> list[str]:
    texts: Any = prompts_of(given if isinstance(given, str) else list(given), service.config, name)
    return list(texts)


async def _classified(
    request: web.Request, body: PooledFields, service: Service, inputs: list[str] | list[list[int]]
) -> list[SequenceScores]:
    found = await service.engine.classify(
        inputs, adapter_name=service.adapter_of(body.model), **request_options(request, body)
    )
    return found if isinstance(found, list) else [found]


async def _scores_of_pairs(
    request: web.Request, body: ScoreRequest | RerankRequest, service: Service, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], int]:
    """Return the scores of pairs, from 0 to 1 unless raw ones are asked for, and the number of tokens used. Raises
    ApiError if the model gives several scores, none of which rates a pair."""
    engine = service.engine
    if len(engine.limits.labels) > 1:
        raise ApiError(
            400,
            f"The model has {len(engine.limits.labels)} labels and no score for a pair. Ask /classify.",
            code="unsupported_feature",
        )
    options = request_options(request, body)
    adds = body.add_special_tokens is not False
    before = engine.tokenizer.model.prefix if adds else ()
    kept = kept_tokens(body, engine.session_len, len(before))
    firsts, seconds = [
        await engine.encode(list(texts), do_preprocess=False, add_bos=add_bos, bounded=kept is None, **options)
        for texts, add_bos in zip(zip(*pairs, strict=True), (adds, False), strict=True)
    ]
    both: Any = zip(firsts, seconds, strict=True)
    inputs = [[*before, *truncated(body, first[len(before) :] + second, kept)] for first, second in both]
    found = await _classified(request, body, service, inputs)
    scores = [each.values[0] for each in found]
    if body.use_activation is not False:
        scores = [_sigmoid(score) for score in scores]
    return scores, sum(each.input_token_len for each in found)


def _probabilities(scores: Sequence[float]) -> list[float]:
    """Return the softmax of several scores, or the logistic function of one."""
    if len(scores) == 1:
        return [_sigmoid(scores[0])]
    highest = max(scores)
    powers = [math.exp(each - highest) for each in scores]
    return [each / sum(powers) for each in powers]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
