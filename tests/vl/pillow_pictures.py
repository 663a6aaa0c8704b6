"""transformers' image processors of LFM2-VL and Kimi-K2.5, which are written over torchvision: their own steps, with
torchvision's operations by torch, and resizing by Pillow, which rounds otherwise here and there."""

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

__all__ = ["kimi_pictures", "lfm2_pictures"]


def lfm2_pictures(fields: Mapping[str, Any]) -> Any:
    """Return what gives the inputs of images, by the settings of a preprocessor_config.json."""
    names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    return _by_pillow("lfm2_vl", "Lfm2VlImageProcessor", fields, _READ, names)


def kimi_pictures(fields: Mapping[str, Any]) -> Any:
    """Return the same for Kimi-K2.5."""
    read = (*_COMMON, "size", "patch_size", "merge_size", "max_patches")
    return _by_pillow("kimi_k25", "Kimi_K25ImageProcessor", fields, read, ("pixel_values", "image_grid_thw"))


def _by_pillow(family: str, name: str, fields: Mapping[str, Any], read: Sequence[str], results: Sequence[str]) -> Any:
    from transformers.image_processing_utils import BaseImageProcessor
    from transformers.image_utils import SizeDict

    class Base(BaseImageProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def resize(self, images: Tensor, size: Any, resample: int, **unused: Any) -> Tensor:
            pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images]
            scaled = [each.resize((size.width, size.height), Image.Resampling(resample)) for each in pictures]
            return torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in scaled])

        def pad(self, images: Tensor, pad_size: Any) -> Tensor:
            height, width = images.shape[-2:]
            return torch.nn.functional.pad(images, (0, pad_size.width - width, 0, pad_size.height - height))

        def rescale_and_normalize(
            self, images: Tensor, rescale: bool, factor: float, normalize: bool, mean: Any, std: Any
        ) -> Tensor:
            less, by = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))
            return (images * factor - less) / by

        def __call__(self, images: Sequence[Image.Image], **unused: Any) -> dict[str, Tensor]:
            given = {name: fields.get(name, getattr(self, name)) for name in read}
            if isinstance(given.get("size"), dict):
                given["size"] = SizeDict(**given["size"])
            tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
            done = self._preprocess(tensors, **given, disable_grouping=True, return_tensors=None)
            return {name: done[name] for name in results}

    with stand_ins(), patch("transformers.image_processing_backends.TorchvisionBackend", Base):
        module = import_module(f"transformers.models.{family}.image_processing_{family}")
    processor = getattr(module, name)
    return processor.__new__(processor)


_COMMON = ("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
_READ = (
    *_COMMON,
    *("downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens"),
    *("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "do_pad", "return_row_col_info"),
)
