"""Keywords of a pipeline's calls: options of the request, and fields of the GenerationConfig as in older LMDeploy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from asyncllm.config.engine import EngineConfig
from asyncllm.config.generation import GenerationConfig
from asyncllm.config.lmdeploy_settings import CALLS, without_unsupported
from asyncllm.config.request import RequestKeywords
from asyncllm.errors import InvalidParameter

__all__ = ["GenConfigs", "replaced", "split_options"]

Config = TypeVar("Config", EngineConfig, GenerationConfig)
GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None

DIRECT_OPTIONS = {
    "request_output_len": "max_new_tokens",
    **{
        name: name
        for name in ("top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos", "random_seed", "stop_words")
    },
}
"""Keywords that programs for older versions of LMDeploy pass instead of a GenerationConfig -> its fields."""


def replaced(config: Config, fields: dict[str, Any]) -> Config:
    """Return a checked copy of `config` with these fields. A value of the wrong type is left for the engine to
    refuse."""
    if not isinstance(config, EngineConfig | GenerationConfig):
        return config
    return config.from_dict({**msgspec.structs.asdict(config), **fields}).checked()


def split_options(gen_config: GenConfigs, options: dict[str, Any]) -> tuple[GenConfigs, RequestKeywords]:
    """Return `gen_config` with the options that are its fields, and the options that concern the request."""
    keywords: Any = {name: value for name, value in options.items() if name in RequestKeywords.__optional_keys__}
    options = without_unsupported(CALLS, {name: value for name, value in options.items() if name not in keywords})
    if "enable_thinking" in options:
        variables = keywords.get("chat_template_kwargs") or {}
        keywords["chat_template_kwargs"] = {**variables, "enable_thinking": options.pop("enable_thinking")}
    for name in options:
        if name not in DIRECT_OPTIONS:
            raise InvalidParameter(
                f"There is no option {name!r}. Sampling is set in gen_config; direct options are "
                f"enable_thinking, {', '.join([*sorted(RequestKeywords.__optional_keys__), *DIRECT_OPTIONS])}.",
                name,
            )
    fields = {DIRECT_OPTIONS[name]: value for name, value in options.items()}
    if fields and isinstance(gen_config, list | tuple):
        return [replaced(config, fields) for config in gen_config], keywords
    if fields and isinstance(gen_config, GenerationConfig | None):
        return replaced(gen_config or GenerationConfig(), fields), keywords
    return gen_config, keywords
