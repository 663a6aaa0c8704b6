"""How images are encoded, under LMDeploy's name."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncllm.config.settings import Settings

__all__ = ["VisionConfig"]


class VisionConfig(Settings, frozen=True):
    """How a pipeline encodes images. `EngineConfig.vision_max_batch_size` is the same setting for any engine."""

    max_batch_size: Annotated[
        int, Meta(ge=1, le=4096, description="Maximum number of images that the tower encodes at once.")
    ] = 1
    thread_safe: Annotated[
        bool, Meta(description="Make calls from several threads safe. They always are, so False changes nothing.")
    ] = False
