"""What the tools are for: products err less than with weights that are rounded to nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm.layers.norm import RMSNorm
from asyncllm.lite.eight_bits import SmoothQuant
from asyncllm.lite.few_bits import FewBits, Scaled
from asyncllm.lite.gptq import inverse_factor, round_columns
from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.recipe import Recipe
from asyncllm.lite.rounding import Grid
from asyncllm.lite.search import Consumer
from asyncllm.lite.smoothing import Group

N, K = 48, 128


def case(outliers: bool = True) -> tuple[Tensor, InputStatistics, Tensor]:
    """A weight, statistics of its inputs, some of whose features are thirty times as large as others and depend on each
    other, and new inputs of the same kind."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    mixing = torch.eye(K) + 0.3 * torch.randn(K, K, generator=generator) / K**0.5 * 3
    inputs = torch.randn(3000, K, generator=generator) @ mixing
    if outliers:
        inputs[:, ::17] *= 30
    statistics = InputStatistics.empty(K, torch.device("cpu"))
    for part in inputs[:2000].split(300):
        statistics.add(part)
    return torch.randn(N, K, generator=generator) * 0.1, statistics, inputs[2000:]


def error(recipe: Recipe, weight: Tensor, statistics: InputStatistics, inputs: Tensor) -> float:
    """Of products with inputs that were not seen, behind scales and rounding."""
    norm = RMSNorm(K, 1e-5)
    group = Group(norm, ())
    scales = recipe.scales(group, [Consumer(weight, statistics)])
    scales = torch.ones(K) if scales is None else scales
    statistics.divide(scales)
    values = recipe.round(weight * scales, statistics).values
    divided = inputs / scales
    if isinstance(recipe, SmoothQuant):
        largest = divided.abs().amax(1, keepdim=True) / 127
        divided = (divided / largest).round() * largest
    return float((divided @ values.t() - inputs @ weight.t()).square().mean())


def test_scales_ranges_and_codes_each_lower_the_error() -> None:
    grid = Grid(4, 32, symmetric=False)
    recipes: list[Recipe] = [
        FewBits(grid, "awq", search_clip=False, compensate=False),
        FewBits(grid, "awq", compensate=False),
        Scaled(grid, "awq", compensate=False),
        Scaled(grid, "awq"),
    ]
    nearest, clipped, scaled, compensated = (error(recipe, *case()) for recipe in recipes)
    assert clipped < nearest
    assert scaled < 0.7 * nearest
    assert compensated < 0.7 * scaled


def test_codes_that_make_up_for_others_err_less_without_outliers_too() -> None:
    for symmetric in (True, False):
        grid = Grid(4, -1, symmetric)
        nearest = error(FewBits(grid, "gptq", search_clip=False, compensate=False), *case(outliers=False))
        for ordered in (True, False):
            recipe = FewBits(grid, "gptq", search_clip=False, ordered=ordered)
            assert error(recipe, *case(outliers=False)) < 0.9 * nearest


def test_smoothed_activations_err_less_where_there_are_outliers() -> None:
    class Plain(SmoothQuant):
        def scales(self, group: Group, consumers: object) -> None:
            return None

    plain = error(Plain(torch.int8, False, compensate=False), *case())
    for search in (False, True):
        assert error(SmoothQuant(torch.int8, False, search_scale=search, compensate=False), *case()) < 0.5 * plain
    assert error(SmoothQuant(torch.int8, False), *case()) < 0.5 * plain


def test_no_search_does_worse_than_none_on_what_it_has_seen() -> None:
    weight, statistics, _ = case(outliers=False)
    for grid in (Grid(4, 32, True), Grid(2, 64, False), Grid(8, -1, True)):
        found = []
        for recipe in (Scaled(grid, "awq", False, False, search_scale=False), Scaled(grid, "awq", False, False)):
            scales = recipe.scales(Group(RMSNorm(K, 1e-5), ()), [Consumer(weight, statistics)])
            scales = torch.ones(K) if scales is None else scales
            difference = grid.nearest(weight * scales) / scales - weight
            found.append(float(((difference @ statistics.moments) * difference).sum()))
        plain = grid.nearest(weight) - weight
        nearest = float(((plain @ statistics.moments) * plain).sum())
        assert found[0] <= nearest * (1 + 1e-5)
        assert found[1] <= nearest * (1 + 1e-5)


@pytest.mark.parametrize("ordered", [False, True])
def test_independent_inputs_leave_the_nearest_codes(ordered: bool) -> None:
    weight, _, _ = case()
    grid = Grid(4, 32, symmetric=False)
    scales, zeros = grid.fit(weight, None, search=False)

    def nearest(values: Tensor, feature: int) -> Tensor:
        return grid.round(values, scales[:, feature // 32], zeros[:, feature // 32])

    found = round_columns(weight, torch.eye(K) * 5, nearest, damp=0.01, ordered=ordered)
    torch.testing.assert_close(found, grid.nearest(weight))


def test_inputs_that_say_little_are_no_error() -> None:
    for moments in (torch.zeros(K, K), torch.ones(K, K)):
        assert inverse_factor(moments, 0.01).isfinite().all()


def test_statistics_do_not_depend_on_how_rows_come() -> None:
    rows = torch.randn(500, K)
    whole, parts = InputStatistics.empty(K, rows.device), InputStatistics.empty(K, rows.device)
    whole.add(rows)
    for part in rows.split([1, 99, 0, 400]):
        parts.add(part)
    assert (whole.count, parts.count) == (500, 500)
    for name in ("largest", "total", "moments"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-4, atol=1e-3)
    whole.divide(torch.full((K,), 2.0))
    torch.testing.assert_close(whole.moments * 4, parts.moments, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(whole.mean, rows.abs().mean(0) / 2)


def test_groups_that_are_nothing_but_zero_stay_zero() -> None:
    weight = torch.zeros(8, 64)
    for grid in (Grid(4, 32, True), Grid(4, 32, False, min_zero=1), Grid(8, -1, False)):
        scales, zeros = grid.fit(weight, None, search=True)
        codes = grid.codes(weight.view(8, scales.shape[1], -1), scales, zeros).view_as(weight)
        decoded, values = grid.decoded(codes, scales, zeros)
        assert not values.any()
        assert decoded.scales.isfinite().all()
        assert (decoded.scales > 0).all()
