"""Response bodies of LMDeploy's routes and vLLM's tokenization routes. Fields whose value is UNSET are left out."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "DetokenizeResponse",
    "EncodeResponse",
    "FinishReason",
    "GenerateMeta",
    "GenerateResponse",
    "InteractiveResponse",
    "PerplexityResponse",
    "TokenizeResponse",
]


class FinishReason(msgspec.Struct, kw_only=True):
    type: str


class GenerateMeta(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    finish_reason: FinishReason | None
    output_token_logprobs: list[tuple[float, int]] | UnsetType = UNSET
    """(log-probability, token id) for each of `output_ids`."""


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The whole answer. In a stream, `text`, `output_ids` and the log-probabilities are those new in the event."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class InteractiveResponse(msgspec.Struct, kw_only=True):
    """The whole answer, or one line of a stream, whose `text` is new and whose counts are totals so far."""

    text: str = ""
    tokens: int = 0
    """Generated tokens."""
    input_tokens: int = 0
    """Tokens of this turn's prompt."""
    history_tokens: int = 0
    """Tokens of the conversation before this turn."""
    finish_reason: str | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class EncodeResponse(msgspec.Struct, kw_only=True):
    input_ids: list[int | list[int]]
    length: int | list[int]
    """Length of `input_ids`; a list for several texts."""


class PerplexityResponse(msgspec.Struct, kw_only=True):
    ppl: float
    """The mean cross-entropy of the tokens after the first, in nats: the logarithm of the perplexity."""
