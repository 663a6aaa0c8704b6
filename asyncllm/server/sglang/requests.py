"""SGLang's sampling parameters, within the body of /generate."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from asyncllm.config import (
    MAX_COUNT,
    Choices,
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopP,
)
from asyncllm.server.request.fields import FurtherFields, Stop, TokenIds

__all__ = ["SamplingParams"]


class SamplingParams(FurtherFields, kw_only=True):
    """`sampling_params`. Those that are not given have the same defaults as on /v1/completions."""

    max_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """128 if omitted. 0: nothing but the prompt's log-probabilities is computed."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 and -1: all.")] | None = None
    min_p: MinP | None = None
    stop: Stop = None
    stop_token_ids: TokenIds | None = None
    frequency_penalty: FrequencyPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    n: Choices | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    """The text keeps the stop word."""
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
