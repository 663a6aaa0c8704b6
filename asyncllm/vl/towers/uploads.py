"""Copies of what towers read to their device, for which the event loop does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncllm.prompt_image import PromptImage

__all__ = ["upload", "upload_pixels"]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device. Its copy waits for the stream's earlier work, the caller does not."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_pixels(images: Sequence[PromptImage], like: Tensor) -> Tensor:
    """Return the pixels of all images, one behind the other, of the type and on the device of `like`.

    They are rounded to its type on the host, where they go through pinned memory: from other memory a copy holds its
    thread up until the stream has come to it.
    """
    pixels = [torch.from_numpy(image.pixels) for image in images]
    shape = (sum(len(each) for each in pixels), *pixels[0].shape[1:])
    joined = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
    return torch.cat(pixels, out=joined).to(like.device, non_blocking=True)
