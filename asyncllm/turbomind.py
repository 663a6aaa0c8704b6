"""LMDeploy's place of the other back end, so that programs written for it find its settings and its class."""

from __future__ import annotations

from typing import Self

from asyncllm.config import EngineConfig
from asyncllm.pipeline import Pipeline

__all__ = ["EngineConfig", "TurboMind"]


class TurboMind(Pipeline):
    """What programs use to score token ids: it loads a model, and makes instances of itself."""

    @classmethod
    def from_pretrained(cls, model_path: str, engine_config: EngineConfig | None = None) -> Self:
        return cls(model_path, engine_config)

    def create_instance(self) -> Self:
        """Itself: one engine serves any number of callers."""
        return self
