"""Embeddings: what a caller may ask for, and how prompts become vectors.

A prompt goes through the scheduler as one that is scored does, in chunks and beside others, and no token follows it.
The model side adds its hidden states; what is left to do here is to scale a few thousand numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from asyncllm.config import GenerationConfig, RequestKeywords
from asyncllm.engine.admission import Admission
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.generation import Generation, Host
from asyncllm.engine.sequence import Request
from asyncllm.errors import InvalidMessage, InvalidParameter
from asyncllm.types import Chunk, Embedding, Pooling

__all__ = ["EmbeddingForm", "EmbeddingInput", "embed"]

EmbeddingInput = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""One prompt (a text or token ids), or a list of them."""


class EmbeddingForm:
    """How pooled hidden states become a vector."""

    def __init__(self, pooling: Pooling, normalize: bool, dimensions: int | None, hidden_size: int) -> None:
        """Raises InvalidParameter."""
        if pooling not in get_args(Pooling):
            raise InvalidParameter(f"pooling must be 'last' or 'mean' (given: {pooling!r}).", "pooling")
        if type(normalize) is not bool:
            raise InvalidParameter(f"normalize must be True or False (given: {normalize!r}).", "normalize")
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= hidden_size):
            raise InvalidParameter(
                f"dimensions must be in [1, {hidden_size}], as the model's vectors have {hidden_size} entries "
                f"(given: {dimensions!r}). None gives them all.",
                "dimensions",
            )
        self.pooling = pooling
        self._normalize = normalize
        self._dimensions = dimensions

    def embedding(self, chunk: Chunk) -> Embedding:
        """The embedding of a prompt, from the chunk of its request."""
        assert chunk.pooled is not None
        values = chunk.pooled[: self._dimensions]
        scale = float(chunk.input_token_len) if self.pooling == "mean" else 1.0
        if self._normalize:
            # The length of a vector of zeros is 0, and it stays what it is.
            scale = math.hypot(*values) or 1.0
        return Embedding(values=[value / scale for value in values], input_token_len=chunk.input_token_len)


async def embed(
    find_host: Callable[[], Host],
    admission: Admission,
    prompts: EmbeddingInput,
    form: EmbeddingForm,
    options: RequestKeywords,
) -> Embedding | list[Embedding]:
    """The embedding of one prompt, or of each one of a list in order. The first error ends all of them."""
    single = _is_single(prompts)
    items: list[Any] = [prompts] if single else list(prompts)
    requests = [_request(find_host, admission, item, form.pooling, options) for item in items]
    embeddings = []
    try:
        for request in requests:
            await request.start()
            await asyncio.sleep(0)  # many prompts do not hold up the loop
        for request in requests:
            embeddings.append(form.embedding(await request.only_chunk()))
            await asyncio.sleep(0)
    finally:
        for request in requests:
            request.cancel()
    return embeddings[0] if single else embeddings


def _is_single(prompts: EmbeddingInput) -> bool:
    """Whether this is one prompt and not a list of them. Raises InvalidMessage when it is neither."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidMessage(
            f"prompts must be a str, a list of token ids, or a list of either, not {type(prompts).__name__}."
        )
    if not prompts:
        raise InvalidMessage("There is nothing to embed: the list is empty. Pass a text, token ids, or a list of them.")
    return isinstance(prompts[0], int)


def _request(
    find_host: Callable[[], Host],
    admission: Admission,
    prompt: str | Sequence[int],
    pooling: Pooling,
    options: RequestKeywords,
) -> Generation:
    async def prepare(delivery: Delivery) -> Request:
        terms = admission.terms(admission.options(options, renders=False))
        if isinstance(prompt, str):
            prompt_ids = await admission.encode(admission.render(prompt, do_preprocess=False))
        else:
            prompt_ids = admission.check_token_ids(prompt, "prompts")
        return admission.build(prompt_ids, GenerationConfig(), delivery, score_only=True, pooling=pooling, terms=terms)

    return Generation(find_host, prepare, Delivery(streaming=False))
