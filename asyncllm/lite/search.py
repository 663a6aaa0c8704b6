"""The scales that a group of features is divided by before it is rounded: which of many lets products err the least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.scaled import round_codes
from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.rounding import Grid
from asyncllm.lite.smoothing import Group

__all__ = ["Reader", "activation_aware", "least", "product_error", "scaled_error", "smoothing"]

_LEAST = 1e-4
"""Of a scale."""


class Reader(NamedTuple):
    """A matrix of a group that is going to be rounded."""

    weight: Tensor
    """float32 [N, K]"""
    inputs: InputStatistics


Error = Callable[[Reader, Tensor], Tensor]
"""What comes of a reader if its inputs are divided by scales [K], and it is multiplied, before both are rounded."""


def least(group: Group, readers: Sequence[Reader], candidates: Iterable[Tensor], error: Error) -> Tensor | None:
    """Return the scales [C] with which the readers' errors add up to the least; None where that is without scales."""
    best, chosen = _total(group, readers, None, error), None
    for scales in candidates:
        found = _total(group, readers, scales, error)
        if found < best:
            best, chosen = found, scales
    return chosen


def _total(group: Group, readers: Sequence[Reader], scales: Tensor | None, error: Error) -> float:
    ones = torch.ones_like(readers[0].inputs.total)
    spread = ones if scales is None else group.at_inputs(scales)
    return sum(float(error(reader, spread)) for reader in readers)


def product_error(grid: Grid) -> Error:
    """Return the squared error of all products of the inputs with a weight that is rounded to nearest."""

    def error(reader: Reader, scales: Tensor) -> Tensor:
        difference = grid.nearest(reader.weight * scales) / scales - reader.weight
        return ((difference @ reader.inputs.moments) * difference).sum()

    return error


def scaled_error(dtype: torch.dtype) -> Error:
    """Return the squared error of products of some inputs, where these and the weight are rounded to 8 bits, with a
    scale for each token and each output feature."""

    def error(reader: Reader, scales: Tensor) -> Tensor:
        rows = reader.inputs.rows
        inputs, weight = _rounded(rows / scales, dtype), _rounded(reader.weight * scales, dtype)
        return (inputs @ weight.t() - rows @ reader.weight.t()).square().sum() / max(1, len(rows))

    return error


def activation_aware(group: Group, readers: Sequence[Reader], grid: Grid, *, search: bool) -> list[Tensor]:
    """Return candidates of AWQ (https://arxiv.org/abs/2306.00978): the larger an input and the smaller its weights
    among those of their groups, the larger the scale."""
    count = sum(reader.inputs.count for reader in readers)
    total = torch.stack([reader.inputs.total for reader in readers]).sum(0)
    inputs = group.of_features(total / max(1, count)).clamp(min=_LEAST)
    parts = [_shares(reader.weight, grid) for reader in readers]
    weights = group.of_features(torch.cat(parts).mean(0)).clamp(min=_LEAST)
    if not search:
        return [_normed((inputs / weights).sqrt())]
    ratios = [step / 20 for step in range(20)]
    return [_normed(inputs**ratio / weights ** (1 - ratio)) for ratio in ratios] + [
        _normed(inputs**ratio) for ratio in ratios[1:]
    ]


def smoothing(group: Group, readers: Sequence[Reader], *, search: bool) -> list[Tensor]:
    """Return candidates of SmoothQuant (https://arxiv.org/abs/2211.10438): what is large in the inputs is shared with
    the weights."""
    largest = torch.stack([reader.inputs.largest for reader in readers]).amax(0)
    inputs = group.of_features(largest).clamp(min=_LEAST)
    columns = torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0)
    weights = group.of_features(columns).clamp(min=_LEAST)
    ratios = [step / 20 for step in range(1, 20)] if search else [0.5]
    return [_normed(inputs**ratio / weights ** (1 - ratio)) for ratio in ratios]


def _shares(weight: Tensor, grid: Grid) -> Tensor:
    """Return each weight as a part of the largest in its group [N, K]."""
    parts = weight.abs().view(len(weight), -1, grid.width(weight.shape[1]))
    return (parts / parts.amax(-1, keepdim=True).clamp(min=1e-12)).view_as(weight)


def _normed(scales: Tensor) -> Tensor:
    scales = scales.clamp(min=_LEAST)
    return scales / (scales.amax() * scales.amin()).sqrt()


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = round_codes(rows, dtype)
    return codes.float() * scales
