"""Embeddings and scores, computed from the pooled hidden states of a prompt.

The prompt is computed in chunks like any other, and no token follows it. The model side sums the hidden states; this
module scales the result, a few thousand numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, get_args

from asyncllm.config import RequestKeywords
from asyncllm.engine.lifecycle import Lifecycle
from asyncllm.engine.requests.generation import Generation
from asyncllm.engine.requests.input_processor import Call
from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.protocol import Limits
from asyncllm.text.sentence_transformers import EmbeddingDefaults
from asyncllm.types import Chunk, Embedding, EmbeddingInput, Pooled, Pooling, SequenceScores

__all__ = ["EmbeddingForm", "Form", "ScoreForm", "pool"]

_Made = TypeVar("_Made", covariant=True)


class EmbeddingForm:
    """How pooled hidden states become a vector."""

    def __init__(
        self,
        pooling: Pooling | None,
        normalize: bool | None,
        dimensions: int | None,
        hidden_size: int,
        defaults: EmbeddingDefaults,
    ) -> None:
        """None selects the checkpoint's setting. Raises InvalidParameter, and UnsupportedFeature if the checkpoint's
        own pooling is not implemented."""
        if pooling is None:
            if defaults.refused:
                raise UnsupportedFeature(
                    f"{defaults.refused} Choose pooling='last' or 'mean' to have hidden states as they are.", "pooling"
                )
            pooling = defaults.pooling
        normalize = defaults.normalize if normalize is None else normalize
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
        self.pooling: Pooled = pooling
        self._normalize = normalize
        self._dimensions = dimensions

    def of_chunk(self, chunk: Chunk) -> Embedding:
        """Return the embedding of a prompt, from the chunk of its request."""
        assert chunk.pooled is not None
        values = chunk.pooled[: self._dimensions]
        scale = float(chunk.input_token_len) if self.pooling == "mean" else 1.0
        if self._normalize:
            # A vector of zeros stays unchanged.
            scale = math.hypot(*values) or 1.0
        return Embedding(values=[value / scale for value in values], input_token_len=chunk.input_token_len)


class ScoreForm:
    """How pooled hidden states become scores."""

    def __init__(self, limits: Limits) -> None:
        """Raise UnsupportedFeature for a model without a score head."""
        if not limits.labels:
            raise UnsupportedFeature(
                "The model has no head that scores sequences. Load a checkpoint of a class that ends in "
                "ForSequenceClassification or ForRewardModel."
            )
        self.pooling: Pooled = "score"

    def of_chunk(self, chunk: Chunk) -> SequenceScores:
        """Return the scores of a prompt, from the chunk of its request."""
        assert chunk.pooled is not None
        return SequenceScores(values=list(chunk.pooled), input_token_len=chunk.input_token_len)


class Form(Protocol[_Made]):
    """How a result is made from a prompt's pooled hidden states: EmbeddingForm or ScoreForm."""

    @property
    def pooling(self) -> Pooled:
        """The choice of hidden states that the model side pools, and the kind of pooling."""

    def of_chunk(self, chunk: Chunk) -> _Made:
        """Return the result for a prompt, from the only chunk of its request."""


async def pool(
    engine: Lifecycle,
    prompts: EmbeddingInput,
    form: Form[_Made],
    options: RequestKeywords,
    adapter_name: str | None = None,
) -> _Made | list[_Made]:
    """Return the result of `form` for one prompt, or for a list of prompts in order. The first error ends them all."""
    single = _is_single(prompts)
    items: list[Any] = [prompts] if single else list(prompts)
    same: dict[str, Any] = {"pooling": form.pooling, "adapter_name": adapter_name, "options": options}
    requests = [Generation(engine, _call(item, **same)) for item in items]
    made: list[_Made] = []
    try:
        for request in requests:
            await request.start()
            await asyncio.sleep(0)  # Many prompts must not block the event loop.
        for request in requests:
            made.append(form.of_chunk(await request.only_chunk()))
            await asyncio.sleep(0)
    finally:
        for request in requests:
            request.cancel()
    return made[0] if single else made


def _call(item: Any, **same: Any) -> Call:
    given: Any = {"prompt": item} if isinstance(item, str) else {"input_ids": item}
    return Call(purpose="embedding", do_preprocess=False, streaming=False, **given, **same)


def _is_single(prompts: EmbeddingInput) -> bool:
    """Return whether this is a single prompt rather than a list. Raises InvalidMessage if it is neither."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidMessage(
            f"prompts must be a str, a list of token ids, or a list of either, not {type(prompts).__name__}."
        )
    if not prompts:
        raise InvalidMessage("There is nothing to embed: the list is empty. Pass a text, token ids, or a list of them.")
    return isinstance(prompts[0], int)
