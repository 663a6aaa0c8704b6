"""Fields that request bodies of several routes and APIs share.

A name is a field of the Struct that a handler reads, or in the table of `unsupported`, or unknown.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from asyncllm.config import MAX_COUNT, MinP, RepetitionPenalty, Temperature, TopP
from asyncllm.text.image_marks import MAX_IMAGES

__all__ = [
    "MAX_MESSAGES",
    "Body",
    "FurtherFields",
    "ImageOptions",
    "ImageUrls",
    "Label",
    "NewTokens",
    "PolicyFields",
    "Prompt",
    "SamplingFields",
    "SessionName",
    "Stop",
    "Variables",
]

Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]
Stop = Annotated[str, Meta(max_length=256)] | Words | bool | None
"""false, as in LMDeploy's early examples, means none."""
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_COUNT)]], Meta(max_length=512)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}(?!\n)$")]

SessionName = Annotated[str, Meta(min_length=1, max_length=256)]
"""A session's id that may be any text."""

MAX_MESSAGES = 4096

Variables = dict[str, str | int | float | bool | None]
"""Variables of a chat template."""

ImageOptions = dict[str, int | float | str]
"""Options of image preparation."""

ImageUrl = str | dict[str, int | float | str]
"""A URL, possibly with options: {"url": ..., "max_pixels": ...}. An empty one means none."""
ImageUrls = Annotated[list[ImageUrl], Meta(max_length=MAX_IMAGES)] | ImageUrl | None

Prompt = str | list[str | int | list[int]]
"""A text, texts, token ids, or several lists of them; a list has elements of one kind."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object. A name that is not a field is refused."""

    model: str | None = None


class FurtherFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object within a body whose names are looked up like the body's own."""


class PolicyFields(Body, kw_only=True):
    """User, priority and timeout of a request; the engine's RequestOptions check them."""

    priority: int | None = None
    """Lower values are served earlier."""
    timeout: float | None = None
    """Seconds from the request's arrival to the last token; then 504, or an error event."""
    user_id: str | None = None
    """The user whose quota it uses, with `qos_config_path`; refused without."""
    cache_salt: str | None = None
    """Only requests with the same salt, and with several keys the same key, share cached prefixes."""


class SamplingFields(PolicyFields, kw_only=True):
    """How tokens are sampled and where an answer ends, on every route that generates."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Stop = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 and -1: all.")] | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
