"""LMDeploy's import path of one back end's settings, for programs written for it."""

from __future__ import annotations

from asyncllm.config import EngineConfig

__all__ = ["EngineConfig"]
