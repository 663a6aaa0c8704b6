"""Scoring: a prompt that is read and not answered, for its logits or the log-probabilities of its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncllm.config import GenerationConfig, RequestKeywords
from asyncllm.engine.admission import Admission
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.generation import Generation, Host
from asyncllm.engine.sequence import Request
from asyncllm.types import Chunk

__all__ = ["score"]


async def score(
    find_host: Callable[[], Host],
    admission: Admission,
    input_ids: Sequence[int],
    config: GenerationConfig,
    options: RequestKeywords,
    *,
    output_logits: bool = False,
) -> Chunk:
    """The one chunk of the prompt's request. Raises InvalidRequest, RequestFailed, EngineError."""

    async def prepare(delivery: Delivery) -> Request:
        terms = admission.terms(options)
        prompt_ids = admission.check_token_ids(input_ids)
        return admission.build(prompt_ids, config, delivery, score_only=True, output_logits=output_logits, terms=terms)

    async with Generation(find_host, prepare, Delivery(streaming=False)) as generation:
        return await generation.only_chunk()
