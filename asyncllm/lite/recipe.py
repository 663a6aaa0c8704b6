"""Recipe: how a tool changes a layer, by moving scales and rounding weights, and how it describes the files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.search import Consumer
from asyncllm.lite.smoothing import Group

__all__ = ["Recipe", "Rounded"]


class Rounded(NamedTuple):
    """A weight [N, K] of the checkpoint after rounding."""

    tensors: dict[str, Tensor]
    """Suffix -> tensor that the file stores in its place."""
    values: Tensor
    """float32 [N, K]: the values that these tensors represent."""


class Recipe(ABC):
    """One way to quantize."""

    reads_inputs: bool = True
    """Whether the recipe uses statistics of the inputs, for which the model runs on texts."""

    @abstractmethod
    def check(self, n: int, k: int) -> None:
        """Raise InvalidParameter or InvalidCheckpoint for a weight [n, k] that the file cannot store."""

    def scales(self, group: Group, consumers: Sequence[Consumer]) -> Tensor | None:
        """Return the scales [C] to divide the group's features by, or None for no scales."""
        return None

    @abstractmethod
    def round(self, weight: Tensor, inputs: InputStatistics | None) -> Rounded:
        """Round a weight float32 [N, K]. `inputs`: None if there are no statistics."""

    @abstractmethod
    def settings(self, plain: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config. `plain` and `quantized`: names of modules, the latter relative to a block."""
