"""Recipes for low-bit weights with unquantized activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.lite.gptq import round_columns
from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.recipe import Recipe, Rounded
from asyncllm.lite.rounding import Grid
from asyncllm.lite.search import Consumer, activation_aware, best_scales, product_error
from asyncllm.lite.smoothing import Group
from asyncllm.quant.awq import awq_settings, encode_gemm
from asyncllm.quant.compressed import encode_packed, packed_settings
from asyncllm.quant.gptq import encode_gptq, gptq_settings
from asyncllm.quant.packed import Decoded

__all__ = ["FewBits", "Scaled"]


@dataclass(frozen=True)
class FewBits(Recipe):
    """Round weights to a grid, without moving scales."""

    grid: Grid
    files: Literal["awq", "gptq", "compressed-tensors"]
    search_clip: bool = True
    """Also try narrower ranges for each group."""
    compensate: bool = True
    """Adjust the remaining weights for the errors of those already rounded; otherwise round each to nearest."""
    damp: float = 0.01
    ordered: bool = True
    writer: str = "asyncllm"
    """Name of the writer in the files."""

    def check(self, n: int, k: int) -> None:
        self.grid.width(k)
        for size, what in ((n, "output"), (k, "input")):
            if size * self.grid.bits % 32:
                raise InvalidCheckpoint(f"{size} {what} features of {self.grid.bits} bits do not fill words of 32")

    def round(self, weight: Tensor, inputs: InputStatistics | None) -> Rounded:
        grid = self.grid
        scales, zeros = grid.fit(weight, None if inputs is None else inputs.moments, search=self.search_clip)
        if inputs is not None and self.compensate:
            size = grid.width(weight.shape[1])

            def nearest(values: Tensor, feature: int) -> Tensor:
                return grid.round(values, scales[:, feature // size], zeros[:, feature // size])

            weight = round_columns(weight, inputs.moments, nearest, damp=self.damp, ordered=self.ordered)
        codes = grid.codes(weight.view(*scales.shape[:2], -1), scales, zeros).view_as(weight)
        decoded, values = grid.decoded(codes, scales, zeros)
        return Rounded(self._encoded(decoded), values)

    def _encoded(self, weight: Decoded) -> dict[str, Tensor]:
        match self.files:
            case "awq":
                return encode_gemm(weight)
            case "gptq":
                return encode_gptq(weight, self.grid.bits)
            case _:
                return encode_packed(weight, self.grid.bits, symmetric=self.grid.symmetric)

    def settings(self, plain: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json, given the names of plain and quantized modules."""
        bits, size, symmetric = self.grid.bits, self.grid.group_size, self.grid.symmetric
        match self.files:
            case "awq":
                return awq_settings(size, plain)
            case "gptq":
                return gptq_settings(
                    bits,
                    size,
                    symmetric=symmetric,
                    damp_percent=self.damp,
                    quantized=quantized,
                    writer=self.writer,
                )
            case _:
                return packed_settings(bits, size, symmetric=symmetric, plain=plain)


@dataclass(frozen=True)
class Scaled(FewBits):
    """Divide large inputs by scales and multiply their weights by them first, as AWQ does."""

    search_scale: bool = True

    def scales(self, group: Group, consumers: Sequence[Consumer]) -> Tensor | None:
        candidates = activation_aware(group, consumers, self.grid, search=self.search_scale)
        return best_scales(group, consumers, candidates, product_error(self.grid))
