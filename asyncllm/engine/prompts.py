"""Prompts of a batch: one or many, each with its generation config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.config import GenerationConfig
from asyncllm.errors import InvalidMessage, InvalidParameter
from asyncllm.types import Message

__all__ = ["Prompts", "is_single", "pair_with_configs"]

Prompts = str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]]
"""One prompt (str or messages), or a list of them."""


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt and not a list of them. Raises InvalidMessage when it is neither."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidMessage(
            f"prompts must be a str, a list of str, messages, or a list of messages, not {type(prompts).__name__}."
        )
    return len(prompts) > 0 and isinstance(prompts[0], dict)


def pair_with_configs(
    prompts: Prompts, gen_config: GenerationConfig | Sequence[GenerationConfig] | None
) -> list[tuple[Any, Any]]:
    """(prompt, its config) for each prompt. Raises InvalidParameter unless there is one config, or one for each."""
    items: list[Any] = [prompts] if is_single(prompts) else list(prompts)
    if not isinstance(gen_config, (list, tuple)):
        return [(item, gen_config) for item in items]
    if len(gen_config) != len(items):
        raise InvalidParameter(
            f"There are {len(items)} prompts and {len(gen_config)} generation configs. Pass one for all, "
            f"or one for each.",
            "gen_config",
        )
    return list(zip(items, gen_config, strict=True))
