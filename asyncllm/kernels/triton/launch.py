"""Launching a kernel with little Python: a step outside CUDA graphs makes some 250 launches.

`kernel[grid](...)` inspects every argument anew to find the compiled variant. `launch` keeps what was found: one
dictionary look-up, then the compiled kernel's own runner, which Triton 3.6 and 3.7 call alike. With five tensors, two
numbers and four constexprs it takes 2.7 us before the driver's part. A kernel that is launched this way follows three
rules:

- Its parameters come in this order: pointers, run-time numbers, constexprs.
- Its run-time integers are named in `do_not_specialize` and fit in 32 bits. No variant depends on their values.
- A pointer into the middle of a tensor of small integers (`kv_lens[decode:]`) is named in
  `do_not_specialize_on_alignment`. Otherwise each alignment that comes along at run time compiles a variant.

There are no hooks: Triton's own profiler does not see these launches, CUPTI and Nsight do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncllm.kernels.triton.language import INTERPRET, PDL

__all__ = ["launch"]

_interpreted: bool = INTERPRET.value

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_Ready = tuple[Callable[..., None], Any, Any, tuple[None, ...]]

_ready: dict[tuple[Any, ...], _Ready] = {}
"""Variant -> runner, function handle, packed metadata, and a place holder for each constexpr."""


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...] = (),
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    pdl: bool = True,
    **constexprs: Any,
) -> None:
    """Run `kernel`, a function under `triton.jit`, on the current stream of the first tensor's device.

    An absent tensor is stood in for by any other, and a constexpr says so. `pdl` is for a kernel that has a constexpr
    USE_PDL, which is passed from here; False launches such a kernel behind its predecessor's end. Raises TypeError when
    the kernel's parameters break the rules above.
    """
    if _interpreted:
        _interpret(kernel, grid, tensors, scalars, constexprs)
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    device = tensors[0].get_device()
    key = (
        id(kernel),
        device,
        num_warps,
        num_stages,
        pdl,
        *[tensor.dtype for tensor in tensors],
        *[pointer & 15 for pointer in pointers],
        *map(type, scalars),
        *constexprs.items(),
    )
    ready = _ready.get(key)
    if ready is None:
        options = {"num_warps": num_warps, "num_stages": num_stages, **_pdl_options(kernel, pdl)}
        _check(kernel, tensors, scalars, constexprs)
        # The first launch of a variant is Triton's own: it compiles, and returns what runs from then on.
        compiled = kernel[grid](*tensors, *scalars, **constexprs, **options)
        places = (None,) * (len(kernel.arg_names) - len(tensors) - len(scalars))
        _ready[key] = compiled.run, compiled.function, compiled.packed_metadata, places
        return
    run, function, metadata, places = ready
    assert _raw_stream is not None
    run(*grid, _raw_stream(device), function, metadata, None, None, None, *pointers, *scalars, *places)


def _pdl_options(kernel: Any, pdl: bool) -> dict[str, Any]:
    if "USE_PDL" in kernel.arg_names:
        return PDL if pdl else {"USE_PDL": False}
    if pdl:
        raise TypeError(f"{kernel.__name__} has no constexpr USE_PDL, so it cannot be launched with pdl=True")
    return {}


def _interpret(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    constexprs: dict[str, Any],
) -> None:
    gate = {"USE_PDL": False} if "USE_PDL" in kernel.arg_names else {}
    kernel[grid](*tensors, *scalars, **constexprs, **gate)


def _check(kernel: Any, tensors: tuple[Tensor, ...], scalars: tuple[float, ...], constexprs: dict[str, Any]) -> None:
    first = len(tensors) + len(scalars)
    named = {parameter.name for parameter in kernel.params[first:]} - {"USE_PDL"}
    if named != set(constexprs) or not all(parameter.is_constexpr for parameter in kernel.params[first:]):
        raise TypeError(
            f"{kernel.__name__} takes {kernel.arg_names}, which is not {len(tensors)} pointers, {len(scalars)} numbers "
            f"and the constexprs {sorted(constexprs)}"
        )
    for parameter, value in zip(kernel.params[len(tensors) : first], scalars, strict=True):
        if isinstance(value, int) and not parameter.do_not_specialize:
            raise TypeError(f"{kernel.__name__} must name {parameter.name} in do_not_specialize")
