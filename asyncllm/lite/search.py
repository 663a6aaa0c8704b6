"""Search for the scales to divide a group of features by before rounding: those with the smallest error of products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.scaled import round_codes
from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.rounding import Grid
from asyncllm.lite.smoothing import Group

__all__ = ["Consumer", "activation_aware", "best_scales", "product_error", "scaled_error", "smoothing"]

_MIN_SCALE = 1e-4
"""Minimum value of a scale."""


class Consumer(NamedTuple):
    """A matrix of a group that is about to be rounded."""

    weight: Tensor
    """float32 [N, K]"""
    inputs: InputStatistics


Error = Callable[[Consumer, Tensor], Tensor]
"""(consumer, scales [K]) -> error after its inputs are divided and its weight multiplied by scales, and both
rounded."""


def best_scales(
    group: Group, consumers: Sequence[Consumer], candidates: Iterable[Tensor], error: Error
) -> Tensor | None:
    """Return the scales [C] with the smallest total error of the consumers, or None if no scales are better."""
    best, chosen = _total(group, consumers, None, error), None
    for scales in candidates:
        found = _total(group, consumers, scales, error)
        if found < best:
            best, chosen = found, scales
    return chosen


def _total(group: Group, consumers: Sequence[Consumer], scales: Tensor | None, error: Error) -> float:
    ones = torch.ones_like(consumers[0].inputs.total)
    spread = ones if scales is None else group.at_inputs(scales)
    return sum(float(error(consumer, spread)) for consumer in consumers)


def product_error(grid: Grid) -> Error:
    """Return the squared error of all products of the inputs with a weight rounded to nearest."""

    def error(consumer: Consumer, scales: Tensor) -> Tensor:
        difference = grid.nearest(consumer.weight * scales) / scales - consumer.weight
        return ((difference @ consumer.inputs.moments) * difference).sum()

    return error


def scaled_error(dtype: torch.dtype) -> Error:
    """Return the squared error of products of sampled inputs, if these and the weight are rounded to 8 bits, with one
    scale for each token and each output feature."""

    def error(consumer: Consumer, scales: Tensor) -> Tensor:
        rows = consumer.inputs.rows
        inputs, weight = _rounded(rows / scales, dtype), _rounded(consumer.weight * scales, dtype)
        return (inputs @ weight.t() - rows @ consumer.weight.t()).square().sum() / max(1, len(rows))

    return error


def activation_aware(group: Group, consumers: Sequence[Consumer], grid: Grid, *, search: bool) -> list[Tensor]:
    """Return AWQ's candidates (https://arxiv.org/abs/2306.00978): a scale grows with the input, and shrinks with the
    magnitude of its weights relative to their groups."""
    count = sum(consumer.inputs.count for consumer in consumers)
    total = torch.stack([consumer.inputs.total for consumer in consumers]).sum(0)
    inputs = group.of_features(total / max(1, count)).clamp(min=_MIN_SCALE)
    parts = [_shares(consumer.weight, grid) for consumer in consumers]
    weights = group.of_features(torch.cat(parts).mean(0)).clamp(min=_MIN_SCALE)
    if not search:
        return [_normed((inputs / weights).sqrt())]
    ratios = [step / 20 for step in range(20)]
    return [_normed(inputs**ratio / weights ** (1 - ratio)) for ratio in ratios] + [
        _normed(inputs**ratio) for ratio in ratios[1:]
    ]


def smoothing(group: Group, consumers: Sequence[Consumer], *, search: bool) -> list[Tensor]:
    """Return SmoothQuant's candidates (https://arxiv.org/abs/2211.10438), which shift part of the inputs' magnitude to
    the weights."""
    largest = torch.stack([consumer.inputs.largest for consumer in consumers]).amax(0)
    inputs = group.of_features(largest).clamp(min=_MIN_SCALE)
    columns = torch.stack([consumer.weight.abs().amax(0) for consumer in consumers]).amax(0)
    weights = group.of_features(columns).clamp(min=_MIN_SCALE)
    ratios = [step / 20 for step in range(1, 20)] if search else [0.5]
    return [_normed(inputs**ratio / weights ** (1 - ratio)) for ratio in ratios]


def _shares(weight: Tensor, grid: Grid) -> Tensor:
    """Return each weight relative to the largest of its group [N, K]."""
    parts = weight.abs().view(len(weight), -1, grid.width(weight.shape[1]))
    return (parts / parts.amax(-1, keepdim=True).clamp(min=1e-12)).view_as(weight)


def _normed(scales: Tensor) -> Tensor:
    scales = scales.clamp(min=_MIN_SCALE)
    return scales / (scales.amax() * scales.amin()).sqrt()


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = round_codes(rows, dtype)
    return codes.float() * scales
