"""transformers' image processor of Llama 4, which is written over torchvision: its own steps and sizes, with
torchvision's operations by torch; resizing by torch, as torchvision does, or by Pillow, which rounds otherwise here and
there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

__all__ = ["llama4_pictures", "stand_ins"]


def llama4_pictures(fields: Mapping[str, Any], *, by_torch: bool = False) -> Any:
    """Return what gives `pixel_values` [tiles, 3, side, side] and `aspect_ratios` of images, by the settings of a
    preprocessor_config.json. `by_torch`: resized by torch."""
    from transformers.image_utils import SizeDict

    with stand_ins():
        module = import_module("transformers.models.llama4.image_processing_llama4")
    size = SizeDict(**fields["size"])

    class Processor(module.Llama4ImageProcessor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            pass

        def resize(self, image: Tensor, size: Any, resample: int) -> Tensor:
            assert resample == Image.Resampling.BILINEAR
            if by_torch:
                return F.interpolate(image, (size.height, size.width), mode="bilinear", antialias=True)
            whole = Image.fromarray(image[0].permute(1, 2, 0).numpy())
            scaled = whole.resize((size.width, size.height), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)[None]

        def normalize(self, image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
            less, by = (torch.tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
            return (image - less) / by

        def __call__(self, images: Sequence[Image.Image], **unused: Any) -> dict[str, Tensor]:
            done = self._preprocess(
                [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images],
                do_resize=True,
                size=size,
                resample=fields["resample"],
                do_rescale=True,
                rescale_factor=fields["rescale_factor"],
                do_normalize=True,
                image_mean=fields["image_mean"],
                image_std=fields["image_std"],
                max_patches=fields["max_patches"],
                resize_to_max_canvas=fields.get("resize_to_max_canvas", False),
                disable_grouping=True,
                return_tensors=None,
            )
            tiles = [each.reshape(-1, *each.shape[-3:]) for each in done["pixel_values"]]
            return {"pixel_values": torch.cat(tiles).float(), "aspect_ratios": torch.stack(done["aspect_ratios"])}

    return Processor()


def _padded(images: Tensor, padding: Sequence[int], fill: Sequence[int]) -> Tensor:
    assert not any(fill)
    left, top, right, bottom = padding
    return F.pad(images, (left, right, top, bottom))


@contextmanager
def stand_ins() -> Iterator[None]:
    """Have modules of torchvision's names, and a base class that asks for none of them."""
    import transformers.image_processing_backends as backends
    from transformers.image_processing_utils import BaseImageProcessor

    functional = ModuleType("torchvision.transforms.v2.functional")
    functional.pad = _padded  # type: ignore[attr-defined]
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    parts = {name: ModuleType(name) for name in names} | {functional.__name__: functional}
    parts[names[2]].functional = functional  # type: ignore[attr-defined]
    known, base = {name: sys.modules.get(name) for name in parts}, backends.TorchvisionBackend
    sys.modules.update(parts)
    backends.TorchvisionBackend = BaseImageProcessor  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        backends.TorchvisionBackend = base  # type: ignore[misc]
        for name, module in known.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
