"""Every setting, written once: name, type, bounds, default and description; a file for each group.

Command-line flags (`flags.py`), `--help`, the bodies of HTTP requests and the documentation derive from these Structs.
"""

from __future__ import annotations

from asyncllm.config.chat_template import Capability, ChatTemplateConfig
from asyncllm.config.engine import EngineConfig, PytorchEngineConfig, TurbomindEngineConfig
from asyncllm.config.generation import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Choices,
    FrequencyPenalty,
    GenerationConfig,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopP,
)
from asyncllm.config.request import RequestKeywords, RequestOptions
from asyncllm.config.server import ServerConfig
from asyncllm.config.settings import MAX_COUNT, checked

__all__ = [
    "MAX_COUNT",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "Capability",
    "ChatTemplateConfig",
    "Choices",
    "EngineConfig",
    "FrequencyPenalty",
    "GenerationConfig",
    "LogitBias",
    "MinP",
    "PresencePenalty",
    "PytorchEngineConfig",
    "RepetitionPenalty",
    "RequestKeywords",
    "RequestOptions",
    "ServerConfig",
    "Temperature",
    "TopP",
    "TurbomindEngineConfig",
    "checked",
]
