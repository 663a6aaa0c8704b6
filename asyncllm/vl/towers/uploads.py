"""Uploads of a tower's inputs to its device, which do not block the calling thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncllm.prompt_image import PromptImage

__all__ = ["upload", "upload_pixels"]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device. The copy waits for the stream's earlier work; the caller does not."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_pixels(images: Sequence[PromptImage], like: Tensor) -> Tensor:
    """Return the concatenated pixels of all images in the dtype and on the device of `like`.

    They are converted on the host into pinned memory; a copy from other memory would block the thread until the stream
    reaches it.
    """
    pixels = [torch.from_numpy(image.pixels) for image in images]
    shape = (sum(len(each) for each in pixels), *pixels[0].shape[1:])
    joined = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
    return torch.cat(pixels, out=joined).to(like.device, non_blocking=True)
