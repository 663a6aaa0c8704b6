"""Every setting, written once: name, type, bounds, default and description; a file for each group.

Command-line flags (`cli/flags.py`), `--help`, the bodies of HTTP requests and the documentation derive from these
Structs.
"""

from __future__ import annotations

from asyncllm.config.chat_template import Capability, ChatTemplateConfig
from asyncllm.config.distributor import DistributorConfig, RoutingStrategy
from asyncllm.config.engine import SERVED_QUEUE, EngineConfig, PytorchEngineConfig, TurbomindEngineConfig
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
from asyncllm.config.listen import ListenConfig
from asyncllm.config.lite import LITE_TOOLS, LiteConfig
from asyncllm.config.request import RequestKeywords, RequestOptions, Tools
from asyncllm.config.server import DEFAULT_URL, ServerConfig
from asyncllm.config.settings import MAX_COUNT, checked
from asyncllm.config.vision import VisionConfig

__all__ = [
    "DEFAULT_URL",
    "LITE_TOOLS",
    "MAX_COUNT",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "SERVED_QUEUE",
    "Capability",
    "ChatTemplateConfig",
    "Choices",
    "DistributorConfig",
    "EngineConfig",
    "FrequencyPenalty",
    "GenerationConfig",
    "ListenConfig",
    "LiteConfig",
    "LogitBias",
    "MinP",
    "PresencePenalty",
    "PytorchEngineConfig",
    "RepetitionPenalty",
    "RequestKeywords",
    "RequestOptions",
    "RoutingStrategy",
    "ServerConfig",
    "Temperature",
    "Tools",
    "TopP",
    "TurbomindEngineConfig",
    "VisionConfig",
    "checked",
]
