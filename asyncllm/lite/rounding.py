"""Round weights to low-bit codes, with a scale and a zero point for each group of input features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.errors import InvalidParameter
from asyncllm.quant.packed import Decoded

__all__ = ["SHRINKS", "Grid"]

SHRINKS = tuple(1 - step / 40 for step in range(21))
"""Fractions of a group's range to try."""

_ROWS_AT_ONCE = 2**26
"""Maximum number of elements for which ranges are tried at a time."""


@dataclass(frozen=True)
class Grid:
    """Codes of `bits` bits that stand for (code - zero) * scale, in groups of `group_size` adjacent input features, or
    in one group for -1."""

    bits: int
    group_size: int
    symmetric: bool
    dtype: torch.dtype = torch.float16
    """dtype of the stored scales."""
    min_zero: int = 0
    """The smallest zero point that the file can store."""

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def width(self, columns: int) -> int:
        """Return the number of input features in a group. Raises InvalidParameter unless it divides `columns`."""
        if self.group_size == -1:
            return columns
        if columns % self.group_size:
            raise InvalidParameter(
                f"w_group_size = {self.group_size} does not divide {columns} input features. Take a divisor of it that "
                f"is a multiple of 32, or -1.",
                "w_group_size",
            )
        return self.group_size

    def place(self, groups: Tensor, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the stored scales and zero points [..., 1] float32 of groups [..., g] float32, with each group's range
        multiplied by `shrink` [..., 1]."""
        if self.symmetric:
            scales = groups.abs().amax(-1, keepdim=True) * shrink / (self.top / 2)
            zeros = torch.full_like(scales, (self.top + 1) // 2)
        else:
            low = groups.amin(-1, keepdim=True).clamp(max=0) * shrink
            high = groups.amax(-1, keepdim=True).clamp(min=0) * shrink
            scales, zeros = (high - low) / self.top, low
        # The smallest values of a dtype are sparse.
        scales = scales.clamp(min=1e-5 if self.dtype == torch.float16 else 1e-12).to(self.dtype).float()
        if not self.symmetric:
            zeros = (-zeros / scales).round().clamp(self.min_zero, self.top)
        return scales, zeros

    def codes(self, groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest codes, in float32."""
        return (groups / scales).round_().add_(zeros).clamp_(0, self.top)

    def round(self, groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest representable values."""
        return self.codes(groups, scales, zeros).sub_(zeros).mul_(scales)

    def nearest(self, weight: Tensor) -> Tensor:
        """Return a weight [N, K] rounded to nearest, with each group's full range."""
        groups = weight.view(len(weight), -1, self.width(weight.shape[1]))
        return self.round(groups, *self.place(groups)).view_as(weight)

    def fit(self, weight: Tensor, moments: Tensor | None, *, search: bool) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points [N, G, 1] float32 for weight [N, K].

        With `search`, each group gets the one of `SHRINKS` with the smallest error of the product with the inputs,
        computed from their second moments [K, K], or without these the smallest error of the weight.
        """
        size = self.width(weight.shape[1])
        if not search:
            return self.place(weight.view(len(weight), -1, size))
        own = (
            None
            if moments is None
            else torch.stack(
                [moments[start : start + size, start : start + size] for start in range(0, weight.shape[1], size)]
            )
        )
        parts = torch.split(weight, max(1, _ROWS_AT_ONCE // weight.shape[1]))
        found = [self._search(part.view(len(part), -1, size), own) for part in parts]
        return torch.cat([each[0] for each in found]), torch.cat([each[1] for each in found])

    def _search(self, groups: Tensor, moments: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points for which rounding groups [N, G, size] changes products least.

        `moments`: second moments of the inputs by group [G, size, size]; None: minimize the error of the weights.
        """
        best = scales = zeros = None
        for shrink in SHRINKS:
            tried = self.place(groups, shrink)
            difference = self.round(groups, *tried) - groups
            spread = difference if moments is None else torch.einsum("ngi,gij->ngj", difference, moments)
            error = (spread * difference).sum(-1, keepdim=True)
            if best is None or scales is None or zeros is None:
                best, (scales, zeros) = error, tried
                continue
            better = error < best
            best = torch.where(better, error, best)
            scales, zeros = torch.where(better, tried[0], scales), torch.where(better, tried[1], zeros)
        assert scales is not None
        assert zeros is not None
        return scales, zeros

    def decoded(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Decoded, Tensor]:
        """codes [N, K] with scales and zero points [N, G, 1], all float32 -> the file's contents, and the weight's
        values."""
        n, k = codes.shape
        weight = ((codes.view(n, scales.shape[1], -1) - zeros) * scales).view(n, k)
        stored = scales[..., 0].t().to(self.dtype), zeros[..., 0].t().to(torch.uint8)
        return Decoded(codes.to(torch.uint8), *stored), weight
