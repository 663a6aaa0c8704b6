"""transformers' image processor of Command A Vision, which is written over torchvision: its choice of tiles, in the one
of InternVL that is written over Pillow, from which it differs in nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from unittest.mock import patch

from tests.vl.llama4_pictures import stand_ins

__all__ = ["cohere2_pictures"]


def cohere2_pictures(fields: Mapping[str, Any]) -> Any:
    """Return the processor by the settings of a preprocessor_config.json."""
    usual = import_module("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    with stand_ins():
        own = import_module("transformers.models.cohere2_vision.image_processing_cohere2_vision")

    class Processor(usual.GotOcr2ImageProcessorPil):  # type: ignore[misc, name-defined]
        def crop_image_to_patches(self, *args: Any, **kwargs: Any) -> Any:
            with patch.object(usual, "get_optimal_tiled_canvas", own.get_optimal_tiled_canvas):
                return super().crop_image_to_patches(*args, **kwargs)

    return Processor(**fields)
