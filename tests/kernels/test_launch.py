"""The thin launcher: one variant per key, the right arguments in the right places."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from asyncllm.kernels.triton import launch as module
from asyncllm.kernels.triton.language import wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap, launch
from tests.kernels.device import DEVICE


class Parameter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_constexpr = name.isupper()
        self.do_not_specialize = name == "count"


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, runs: list[tuple[Any, ...]]) -> None:
        self._runs = runs

    def run(self, *args: Any) -> None:
        self._runs.append(args)


class FakeKernel:
    """As much of a JIT function as `launch` uses; it records compilations and runs."""

    __name__ = "fake"

    def __init__(self, *names: str) -> None:
        self.params = [Parameter(name) for name in names]
        self.arg_names = list(names)
        self.compilations: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_run(*args: Any, **options: Any) -> Compiled:
            self.compilations.append((grid, args, options))
            return Compiled(self.runs)

        return compile_and_run


@pytest.fixture(autouse=True)
def _no_variant_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_configured", {})


@pytest.fixture
def _faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither interpreter nor stream: for fake kernels."""
    monkeypatch.setattr(module, "_interpreted", False)
    monkeypatch.setattr(module, "_raw_stream", lambda device: f"stream of {device}")


FAKED = pytest.mark.usefixtures("_faked")
X = torch.zeros(64)


@FAKED
def test_the_second_launch_runs_what_the_first_compiled() -> None:
    kernel = FakeKernel("x", "count", "SIZE", "USE_PDL")
    launch(kernel, (2, 3, 1), (X,), (7,), SIZE=4, num_warps=8, pdl=False)
    assert kernel.compilations == [
        ((2, 3, 1), (X, 7), {"SIZE": 4, "USE_PDL": False, "num_warps": 8, "num_stages": 3}),
    ]
    assert kernel.runs == []
    launch(kernel, (5, 1, 1), (X,), (1,), SIZE=4, num_warps=8, pdl=False)
    assert len(kernel.compilations) == 1
    assert kernel.runs == [
        (5, 1, 1, "stream of -1", "function", "metadata", None, None, None, X.data_ptr(), 1, None, None),
    ]


@FAKED
@pytest.mark.parametrize(
    "other",
    [
        {"tensors": (X.to(torch.int32),)},
        {"tensors": (X[1:],)},
        {"scalars": (2.5,)},
        {"constexprs": {"SIZE": 8}},
        {"num_warps": 2},
        {"num_stages": 1},
        {"fp_fusion": False},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_makes_another_variant(other: dict[str, Any]) -> None:
    kernel = FakeKernel("x", "count", "SIZE")
    usual: dict[str, Any] = {"tensors": (X,), "scalars": (7,), "constexprs": {"SIZE": 4}}
    usual |= {"num_warps": 4, "num_stages": 3, "fp_fusion": True}

    def run(*, tensors: Any, scalars: Any, constexprs: Any, **options: Any) -> None:
        launch(kernel, (1, 1, 1), tensors, scalars, pdl=False, **options, **constexprs)

    run(**usual)
    run(**usual | other)
    run(**usual)
    assert len(kernel.compilations) == 2
    assert len(kernel.runs) == 1


@FAKED
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("x", "number", "SIZE"), "must name number in do_not_specialize"),
        (("x", "SIZE", "count"), "is not 1 pointers, 1 numbers"),
        (("x", "count", "SIZE", "OTHER"), "is not 1 pointers"),
        (("x", "count", "more", "SIZE"), "is not 1 pointers"),
    ],
)
def test_kernels_that_break_the_rules(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        launch(FakeKernel(*names), (1, 1, 1), (X,), (7,), SIZE=4, pdl=False)


@FAKED
def test_a_configured_kernel_is_told_what_changes() -> None:
    kernel = FakeKernel("x", "count", "SIZE")
    configured = Configured(kernel, pdl=False, num_warps=8, fp_fusion=False, SIZE=4)
    for count in (1, 5, 6):
        configured((count, 1, 1), (X,), (count,))
    options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
    assert kernel.compilations == [((1, 1, 1), (X, 1), {"SIZE": 4, **options})]
    assert [(run[0], run[-2:]) for run in kernel.runs] == [(5, (5, None)), (6, (6, None))]


@FAKED
def test_tensor_maps_are_checked_once_and_then_passed_as_they_are() -> None:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    matrix = torch.zeros(64, 128, dtype=torch.bfloat16)
    kernel = FakeKernel("matrix", "x", "count", "SIZE")
    configured = Configured(kernel, pdl=False, maxnreg=168, SIZE=4)
    maps = [TensorMap(matrix, (8, 64), layout), TensorMap(matrix[8:], (8, 64), layout)]
    for each in maps:
        configured((1, 1, 1), (X,), (7,), (each,))
    ((_, arguments, options),) = kernel.compilations
    assert arguments == (TensorDescriptor(matrix, [64, 128], [128, 1], [8, 64], layout), X, 7)
    assert options == {"SIZE": 4, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    assert [run[9:] for run in kernel.runs] == [(maps[1], X.data_ptr(), 7, None)]
    assert (maps[1].shape, maps[1].strides) == ((56, 128), (128, 1))
    configured((1, 1, 1), (X,), (7,), (TensorMap(matrix, (16, 64), layout),))
    configured((1, 1, 1), (X,), (7,), (TensorMap(matrix.half(), (8, 64), layout),))
    assert len(kernel.compilations) == 3, "tiles and type are those of a variant"
    with pytest.raises(AssertionError, match="aligned"):
        configured((1, 1, 1), (X,), (7,), (TensorMap(matrix[:, :100].contiguous()[:, 1:], (32, 64), layout),))


def jitted_functions() -> list[Any]:
    """The functions under `triton.jit` that take USE_PDL, as (file and name, syntax tree): not those that only hand it
    to one of their partitions, which is in the list itself."""
    found = []
    for file in sorted(Path(module.__file__).parent.glob("*.py")):
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        gated = [node for node in functions if "USE_PDL" in [argument.arg for argument in node.args.args]]
        names = {node.name for node in gated}
        for node in gated:
            used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if not used & names:
                found.append(pytest.param(node, id=f"{file.stem}:{node.name}"))
    return [entry for entry in found if not str(entry.id).startswith("language:")]


@pytest.mark.parametrize("kernel", jitted_functions())
def test_every_kernel_waits_and_releases(kernel: ast.FunctionDef) -> None:
    """Once each, whatever the arguments are: a block that returned before the wait would let data be read too early. A
    kernel that may run beside the one in front waits at the start, or in one of its blocks at the end."""
    calls = [ast.unparse(statement) for statement in kernel.body]
    if "BESIDE" in {argument.arg for argument in kernel.args.args}:
        assert calls.count("if not BESIDE:\n    wait_for_producers(USE_PDL)") == 1
        assert re.fullmatch(r"if BESIDE and .* == 0:\n    wait_for_producers\(USE_PDL\)", calls[-1])
    else:
        assert calls.count("wait_for_producers(USE_PDL)") == 1
    assert calls.count("release_consumers(USE_PDL)") == 1


@FAKED
def test_pdl_needs_a_kernel_that_waits() -> None:
    with pytest.raises(TypeError, match="USE_PDL"):
        launch(FakeKernel("x", "SIZE"), (1, 1, 1), (X,), SIZE=4)


@triton.jit(do_not_specialize=["count", "factor"])
def scale_kernel(x_ptr, out_ptr, count, factor, SIZE: tl.constexpr, USE_PDL: tl.constexpr):
    wait_for_producers(USE_PDL)
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=index < count) * factor, mask=index < count)


def test_a_real_kernel() -> None:
    """Twice with each count: compiled at first, then run directly."""
    for count in (1, 16, 37, 37, 16, 1):
        x, out = torch.arange(40.0, device=DEVICE), torch.zeros(40, device=DEVICE)
        for factor in (2.0, 3.0):
            launch(scale_kernel, (-(-count // 16), 1, 1), (x, out), (count, factor), SIZE=16)
            expected = torch.where(torch.arange(40, device=DEVICE) < count, x * factor, 0.0)
            assert torch.equal(out, expected)
    # No count and no factor made a variant of its own.
    (configured,) = module._configured.values()
    assert len(configured._ready) == (1 if DEVICE.type == "cuda" else 0)


@pytest.mark.gpu
def test_launches_are_captured_in_a_graph() -> None:
    x, out = torch.arange(40.0, device=DEVICE), torch.zeros(40, device=DEVICE)
    launch(scale_kernel, (3, 1, 1), (x, out), (40, 2.0), SIZE=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch(scale_kernel, (3, 1, 1), (x, out), (40, 2.0), SIZE=16)
            launch(scale_kernel, (3, 1, 1), (out, x), (40, 0.5), SIZE=16)
        launch(scale_kernel, (3, 1, 1), (x, out), (40, 4.0), SIZE=16)
    out.zero_()
    graph.replay()
    assert torch.equal(out, torch.arange(40.0, device=DEVICE) * 4)
