"""Recipes for 8-bit weights with 8-bit activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncllm.kernels.scaled import GROUP, round_codes
from asyncllm.lite.gptq import round_columns
from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.recipe import Recipe, Rounded
from asyncllm.lite.search import Consumer, best_scales, scaled_error, smoothing
from asyncllm.lite.smoothing import Group
from asyncllm.quant.compressed import scaled_settings
from asyncllm.quant.fp8 import block_settings, round_blocks
from asyncllm.quant.smooth_quant import smooth_settings

__all__ = ["BlockedFP8", "SmoothQuant"]


@dataclass(frozen=True)
class SmoothQuant(Recipe):
    """One scale for each output feature and each token."""

    dtype: torch.dtype
    compressed: bool
    search_scale: bool = True
    compensate: bool = True
    """Adjust the remaining weights for the errors of those already rounded; otherwise round each to nearest."""
    damp: float = 0.01

    def check(self, n: int, k: int) -> None:
        """Accept any size."""

    def scales(self, group: Group, consumers: Sequence[Consumer]) -> Tensor | None:
        candidates = smoothing(group, consumers, search=self.search_scale)
        return best_scales(group, consumers, candidates, scaled_error(self.dtype))

    def round(self, weight: Tensor, inputs: InputStatistics | None) -> Rounded:
        codes, scales = round_codes(weight, self.dtype)
        if inputs is not None and self.compensate:

            def nearest(values: Tensor, feature: int) -> Tensor:
                return round_codes(values, self.dtype, scales)[0].float() * scales

            weight = round_columns(weight, inputs.moments, nearest, damp=self.damp, ordered=True)
            codes, _ = round_codes(weight, self.dtype, scales)
        return Rounded(
            {"weight": codes, "weight_scale" if self.compressed else "scale": scales}, codes.float() * scales
        )

    def settings(self, plain: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        return (scaled_settings if self.compressed else smooth_settings)(self.dtype, plain)


@dataclass(frozen=True)
class BlockedFP8(Recipe):
    """e4m3 with one scale for each block of 128 x 128. Needs no calibration inputs."""

    reads_inputs = False

    def check(self, n: int, k: int) -> None:
        """Accept any size, since the last blocks may be smaller."""

    def round(self, weight: Tensor, inputs: InputStatistics | None) -> Rounded:
        codes, scales = round_blocks(weight)
        spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        return Rounded(
            {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread[: len(weight), : weight.shape[1]]
        )

    def settings(self, plain: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        return block_settings(plain)
