"""Prompts that are scored and not answered: the logits after each token, and how likely the tokens were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncllm.config import GenerationConfig, RequestKeywords
from asyncllm.engine.admission import Admission
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.generation import Generation, Host
from asyncllm.engine.sequence import Request
from asyncllm.errors import InvalidParameter
from asyncllm.types import Chunk

__all__ = ["mean_cross_entropy", "score"]


async def score(
    find_host: Callable[[], Host],
    admission: Admission,
    input_ids: Sequence[int],
    options: RequestKeywords,
    config: GenerationConfig | None = None,
    *,
    output_logits: bool = False,
) -> Chunk:
    """The one chunk of a scored prompt. Raises InvalidRequest, EngineError."""

    async def prepare(delivery: Delivery) -> Request:
        terms = admission.terms(admission.options(options, renders=False))
        prompt_ids = admission.check_token_ids(input_ids)
        return admission.build(
            prompt_ids,
            config or GenerationConfig(),
            delivery,
            score_only=True,
            output_logits=output_logits,
            terms=terms,
        )

    async with Generation(find_host, prepare, Delivery(streaming=False)) as generation:
        return await generation.only_chunk()


async def mean_cross_entropy(
    find_host: Callable[[], Host], admission: Admission, input_ids: Sequence[int], options: RequestKeywords
) -> float:
    """Of the tokens after the first, in nats. Raises InvalidRequest, EngineError."""
    if isinstance(input_ids, Sequence) and len(input_ids) < 2:
        raise InvalidParameter("Perplexity needs at least 2 tokens: the first has nothing before it.", "input_ids")
    chunk = await score(find_host, admission, input_ids, options, GenerationConfig(prompt_logprobs=0))
    entries = [entry for entry in chunk.prompt_logprobs or [] if entry is not None]
    return -sum(next(iter(entry.values())) for entry in entries) / len(entries)
