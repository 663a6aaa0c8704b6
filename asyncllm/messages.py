"""LMDeploy's place of the settings and answers, so that programs written for it find them."""

from __future__ import annotations

from asyncllm.config import EngineConfig, GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
from asyncllm.types import Response

__all__ = [
    "EngineConfig",
    "GenerationConfig",
    "PytorchEngineConfig",
    "Response",
    "TurbomindEngineConfig",
    "VisionConfig",
]
