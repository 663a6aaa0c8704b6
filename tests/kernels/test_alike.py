"""On a CPU a function of a number gives the same bits wherever in a tensor the number is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from asyncllm import kernels


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three do not divide the sizes below evenly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": kernels.sigmoid,
    "silu": kernels.silu,
    "silu_mul": kernels.silu_mul,
    "softplus": kernels.softplus,
    "gelu": lambda x: kernels.activate(x, "gelu"),
    "gelu_tanh_mul": kernels.gelu_tanh_mul,
}


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    for rows, features in ((7, 6), (5, 344), (31, 3072)):
        x = torch.randn(rows, features, dtype=dtype) * 3
        together = function(x)
        assert together.shape[0] == rows
        for row, result in zip(x, together, strict=True):
            assert torch.equal(function(row[None])[0], result)


def test_the_functions_are_those_of_torch() -> None:
    for shape in ((), (0,), (3, 5), (2, 3, 64), (40000,)):
        x = torch.randn(shape)
        for function, expected in ((kernels.sigmoid, torch.sigmoid), (kernels.softplus, torch.nn.functional.softplus)):
            torch.testing.assert_close(function(x), expected(x))
    strided = torch.randn(6, 10)[:, ::2]
    torch.testing.assert_close(kernels.silu(strided), torch.nn.functional.silu(strided))
