"""LMDeploy's import path of settings and answers, for programs written for it."""

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
