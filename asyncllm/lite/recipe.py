"""What a tool does to a layer: scales that move, the rounding of a weight, and what the files say of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.search import Reader
from asyncllm.lite.smoothing import Group

__all__ = ["Recipe", "Rounded"]


class Rounded(NamedTuple):
    """A weight [N, K] of the checkpoint behind its rounding."""

    tensors: dict[str, Tensor]
    """What the file has in its place, by suffix."""
    values: Tensor
    """float32 [N, K]: what they say."""


class Recipe(ABC):
    """One way to quantize."""

    reads_inputs: bool = True
    """Whether it is of use to run the model on texts."""

    @abstractmethod
    def check(self, n: int, k: int) -> None:
        """Raise InvalidParameter or InvalidCheckpoint for a weight [n, k] that the file cannot hold."""

    def scales(self, group: Group, readers: Sequence[Reader]) -> Tensor | None:
        """Return what the group's features are to be divided by [C]; None for nothing."""
        return None

    @abstractmethod
    def round(self, weight: Tensor, inputs: InputStatistics | None) -> Rounded:
        """Round a weight float32 [N, K]; `inputs` None where there were none."""

    @abstractmethod
    def settings(self, plain: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config. `plain` and `quantized`: names of modules, the latter within a block."""
