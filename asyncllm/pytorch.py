"""LMDeploy's place of one back end's settings, so that programs written for it find them."""

from __future__ import annotations

from asyncllm.config import EngineConfig

__all__ = ["EngineConfig"]
