"""Scores of sequences: what a caller gets of a model with a head for labels or rewards."""

from __future__ import annotations

from asyncllm.errors import UnsupportedFeature
from asyncllm.protocol import Limits
from asyncllm.types import Chunk, Pooled, SequenceScores

__all__ = ["ScoreForm"]


class ScoreForm:
    """What a prompt's scores are made of, for `embeddings.pool`."""

    def __init__(self, limits: Limits) -> None:
        """Raises UnsupportedFeature for a model without such a head."""
        if not limits.num_labels:
            raise UnsupportedFeature(
                "The model has no head that scores sequences. Load a checkpoint of a class that ends in "
                "ForSequenceClassification or ForRewardModel."
            )
        self.pooling: Pooled = "score"

    def of_chunk(self, chunk: Chunk) -> SequenceScores:
        """Return the scores of a prompt, from the chunk of its request."""
        assert chunk.pooled is not None
        return SequenceScores(values=list(chunk.pooled), input_token_len=chunk.input_token_len)
