"""transformers' image processor of LFM2-VL, which is written over torchvision: its own steps, with torchvision's
operations by torch, and resizing by Pillow, which rounds otherwise here and there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.vl.llama4_pictures import stand_ins

__all__ = ["lfm2_pictures"]


def lfm2_pictures(fields: Mapping[str, Any]) -> Any:
    """Return what gives the inputs of images, by the settings of a preprocessor_config.json."""
    from transformers.image_processing_utils import BaseImageProcessor

    class Base(BaseImageProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def resize(self, images: Tensor, size: Any, resample: int, **unused: Any) -> Tensor:
            pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images]
            scaled = [each.resize((size.width, size.height), Image.Resampling(resample)) for each in pictures]
            return torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in scaled])

        def rescale_and_normalize(
            self, images: Tensor, rescale: bool, factor: float, normalize: bool, mean: Any, std: Any
        ) -> Tensor:
            less, by = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))
            return (images * factor - less) / by

        def __call__(self, images: Sequence[Image.Image], **unused: Any) -> dict[str, Tensor]:
            given = {name: fields.get(name, getattr(self, name)) for name in _READ}
            tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
            done = self._preprocess(tensors, **given, disable_grouping=True, return_tensors=None)
            names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
            return {name: done[name] for name in names}

    with stand_ins(), patch("transformers.image_processing_backends.TorchvisionBackend", Base):
        module = import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    return module.Lfm2VlImageProcessor.__new__(module.Lfm2VlImageProcessor)


_READ = (
    *("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    *("downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens"),
    *("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "do_pad", "return_row_col_info"),
)
