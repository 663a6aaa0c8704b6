"""Prompts of a batch: one or several, each with its generation config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncllm.config import GenerationConfig
from asyncllm.errors import InvalidMessage, InvalidParameter
from asyncllm.text.image_marks import names_image, text_first
from asyncllm.types import ImagePrompt, Message

__all__ = [
    "Prompts",
    "check_one_prompt",
    "is_single",
    "is_token_ids",
    "longest_first",
    "no_prompt",
    "pair_with_configs",
]

Prompts = (
    str
    | ImagePrompt
    | Sequence[str | ImagePrompt]
    | Sequence[Message]
    | Sequence[Sequence[Message]]
    | Sequence[Sequence[int]]
)
"""One prompt (str, messages, or a text with images), or a list of prompts; in a list, a prompt may also be given as
token ids."""


def check_one_prompt(messages: object, input_ids: object) -> None:
    """Raise InvalidParameter for a prompt that is given twice, InvalidMessage for token ids instead of a text."""
    if messages is not None and input_ids is not None:
        raise InvalidParameter(
            "The prompt is given twice, as messages and as input_ids, and one of them would be ignored. Pass one.",
            "input_ids",
        )
    if isinstance(messages, bytes):
        raise no_prompt(messages)
    if is_token_ids(messages):
        raise InvalidMessage(
            "A prompt is a str or a list of messages, and these are numbers. Pass token ids as input_ids=[...]."
        )


def no_prompt(value: object) -> InvalidMessage:
    """Return the error for a value that cannot be a prompt."""
    return InvalidMessage(
        f"A prompt is a str or a list of messages, not {type(value).__name__}. "
        f"A message looks like {{'role': 'user', 'content': 'Hi'}}."
    )


def is_single(prompts: Prompts) -> bool:
    """Return whether this is a single prompt rather than a list. Raises InvalidMessage if it is neither."""
    if isinstance(prompts, str) or _has_images(prompts):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidMessage(
            f"prompts must be a str, a list of str, messages, or a list of messages, not {type(prompts).__name__}."
        )
    return len(prompts) > 0 and isinstance(prompts[0], dict)


def _has_images(prompts: Any) -> bool:
    """Return whether this is (text, images) in either order. In a tuple of two texts, one is an image if it is a URL or
    a file name; otherwise the tuple is a batch."""
    prompts = text_first(prompts)
    if not isinstance(prompts, tuple) or len(prompts) != 2 or not isinstance(prompts[0], str):
        return False
    return not isinstance(prompts[1], str) or names_image(prompts[1])


def pair_with_configs(
    prompts: Prompts, gen_config: GenerationConfig | Sequence[GenerationConfig] | None
) -> list[tuple[Any, Any]]:
    """Return (prompt, its config) for each prompt. Raises InvalidMessage for a value that cannot be a prompt, and
    InvalidParameter unless there is one config, or one per prompt."""
    if is_token_ids(prompts):
        raise InvalidMessage("These are the token ids of a prompt, and a list of prompts is needed. Pass [token_ids].")
    items: list[Any] = [prompts] if is_single(prompts) else list(prompts)
    for item in items:
        if not isinstance(item, Sequence) or isinstance(item, bytes):
            raise no_prompt(item)
    if not isinstance(gen_config, (list, tuple)):
        return [(item, gen_config) for item in items]
    if len(gen_config) != len(items):
        raise InvalidParameter(
            f"There are {len(items)} prompts and {len(gen_config)} generation configs. Pass one for all, "
            f"or one for each.",
            "gen_config",
        )
    return list(zip(items, gen_config, strict=True))


def is_token_ids(prompt: Any) -> bool:
    """Return whether a prompt of a list is given as token ids."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], int)


def longest_first(configs: Sequence[GenerationConfig | None]) -> list[int]:
    """Return the prompts' indices in the order of admission that finishes earliest when all are awaited together.

    Answers that may become long start first, so that none of them runs alone at the end: the longest-processing-time
    rule (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Equal ones keep their order.
    """

    def max_tokens(index: int) -> float:
        # A config of the wrong type raises when its answer starts.
        limit = getattr(configs[index] or GenerationConfig(), "max_new_tokens", None)
        return limit if isinstance(limit, int) else math.inf

    return sorted(range(len(configs)), key=max_tokens, reverse=True)
