"""LMDeploy's import path of its other back end, for programs that use its settings and its class."""

from __future__ import annotations

from os import PathLike
from typing import Self

from asyncllm.config import EngineConfig
from asyncllm.pipeline import Pipeline

__all__ = ["EngineConfig", "TurboMind"]


class TurboMind(Pipeline):
    """The class that programs use to score token ids. It loads a model, and creates instances of itself."""

    @classmethod
    def from_pretrained(cls, model_path: str | PathLike[str], engine_config: EngineConfig | None = None) -> Self:
        return cls(model_path, engine_config)

    def create_instance(self) -> Self:
        """Return itself, since one engine serves any number of callers."""
        return self
