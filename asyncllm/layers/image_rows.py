"""Image-specific weights in a decoder's linear layers, such as the visual experts of CogVLM (Wang et al., 2023). Steps
without images never run them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncllm.layers.images import IMAGE_ROWS, ImageRows, image_parts, image_tokens
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_method import UNQUANTIZED
from asyncllm.layers.step_inputs import Column, StepInputs
from asyncllm.protocol import Batch

__all__ = ["ExpertRows", "ImageExperts", "ImageRowsConfig"]


def _inner(batch: Batch, positions: NDArray[Any]) -> NDArray[Any]:
    inner = np.zeros(len(positions), np.int64)
    start = len(batch.decode)
    for row in batch.prefill:
        for part in image_parts(row):
            place = start + part.position - row.position
            inner[place : place + part.last - part.first] = 1
            if part.last == part.image.num_features:
                inner[place + part.last - part.first - 1] = 0
        start += len(row.tokens)
    return inner


INNER_ROWS = Column(name="inner_image_rows", dtype=torch.int64, per="token", padding=0, of_step=_inner)
"""1 for the tokens of an image except its last one, which is computed as text."""


class ExpertRows(ImageRows):
    """Image tokens, except the last one of each image, use a different weight."""

    columns = (INNER_ROWS, IMAGE_ROWS)

    def __init__(self, linear: Linear, *, bias: bool) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear)
        self.linear.has_bias = bias
        self.linear.attach(UNQUANTIZED)

    def apply_to(self, y: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        method, own = self.linear.method, step[INNER_ROWS][:, None] > 0
        tokens = image_tokens(step)
        if tokens is None:
            return torch.where(own, method.product(self.linear, x), y)
        y[tokens] = torch.where(own[tokens], method.product(self.linear, x[tokens]), y[tokens])
        return y


class ImageRowsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The image-specific parts of a decoder's linear layers."""

    weights: Mapping[str, str]
    """Rows of a weight table, from the checkpoint's modules to these parts and the decoder's."""

    @abstractmethod
    def of_layer(self, name: str, linear: Linear) -> ImageRows | None:
        """Return the image-specific part of the linear layer `name` of a block, or None."""

    def attach(self, layers: nn.ModuleList) -> None:
        """Add the parts to the linear layers of a decoder's blocks."""
        for block in layers:
            for name, module in list(block.named_modules()):
                own = self.of_layer(name, module) if isinstance(module, Linear) else None
                if own is not None:
                    module._modules["image_rows"] = own


class ImageExperts(ImageRowsConfig, frozen=True, kw_only=True):
    """Each linear layer has a second weight for image tokens."""

    qkv_bias: bool
    """Whether the weight of queries, keys and values has a bias."""

    def of_layer(self, name: str, linear: Linear) -> ImageRows | None:
        return ExpertRows(linear, bias=self.qkv_bias and name == "attn.qkv")
