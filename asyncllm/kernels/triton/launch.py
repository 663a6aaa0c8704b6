"""Launches kernels with little Python overhead: a step outside CUDA graphs makes some 250 launches.

`kernel[grid](...)` inspects every argument anew to find the compiled variant, which takes some 40 us of Python for
attention. A `Configured` kernel caches the result: one dictionary look-up, then the compiled kernel's own runner, which
Triton 3.6 and 3.7 call alike. That takes 1.9 us before the driver's part for five tensors, and 2.9 us for nine. A
kernel launched this way follows three rules:

- Its parameters are in this order: tensor descriptors, pointers, run-time numbers, constexprs.
- Its run-time integers are named in `do_not_specialize` and fit in 32 bits. No variant depends on their values.
- A pointer into the middle of a tensor of small integers (`kv_lens[decode:]`) is named in
  `do_not_specialize_on_alignment`. Otherwise each alignment that occurs at run time compiles a variant.

Tensor descriptors are encoded anew for each launch, 3 us of Python each, and go into a graph by value.

There are no hooks: Triton's own profiler does not see these launches, but CUPTI and Nsight do.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncllm.kernels.triton.language import INTERPRET, PDL

__all__ = ["Configured", "TensorMap", "fits_tensor_map", "launch"]

_interpreted: bool = INTERPRET.value

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_ALIGNMENT = 15
"""Address bits that are zero where Triton may load 16 bytes at once."""

_address = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")

_Ready = tuple[Callable[..., None], Any, Any]


class TensorMap:
    """Tiles of a matrix, or of several in one tensor, for TMA, as a Gluon kernel's descriptor. It has what Triton reads
    to encode it, without `TensorDescriptor`'s checks, which take 5 us and are made once, when the kernel is
    compiled."""

    __slots__ = ("base", "block_shape", "layout", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, block_shape: tuple[int, ...], layout: Any) -> None:
        """`base` is aligned to 16 bytes, and so are its rows."""
        self.base = base
        self.shape = base.shape
        self.strides = base.stride()
        self.block_shape = block_shape
        self.layout = layout

    def checked(self) -> Any:
        """Return the equivalent Triton descriptor. Raises AssertionError if TMA cannot read it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout)


def fits_tensor_map(matrix: Tensor) -> bool:
    """Return whether TMA can read the matrix."""
    return matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 and matrix.shape[1] * matrix.itemsize % 16 == 0


class Configured:
    """A kernel with its constexprs and compile options. Calling it with the other arguments launches it.

    A launcher that runs in every layer caches one per shape (`functools.cache`); others call `launch`.
    """

    def __init__(
        self,
        kernel: Any,
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        pdl: bool = True,
        fp_fusion: bool = True,
        maxnreg: int | None = None,
        **constexprs: Any,
    ) -> None:
        """`kernel` is a function under `triton.jit` or `gluon.jit`. `pdl` is for kernels with a constexpr USE_PDL,
        which is passed automatically; False launches such a kernel after its predecessor has ended. Without `fp_fusion`
        every product and every sum is rounded separately. `maxnreg` bounds the registers per thread.

        Raises TypeError if the kernel cannot be launched with `pdl`.
        """
        self._kernel = kernel
        self._constexprs = constexprs
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, **_pdl_options(kernel, pdl)}
        if not fp_fusion:
            self._options["enable_fp_fusion"] = False
        if maxnreg is not None:
            self._options["maxnreg"] = maxnreg
        self._places = (None,) * (len(constexprs) + ("USE_PDL" in kernel.arg_names))
        """A placeholder for each constexpr."""
        self._ready: dict[tuple[Any, ...], _Ready] = {}
        """Device, dtypes and alignments -> runner, function handle, packed metadata."""

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        scalars: tuple[float, ...] = (),
        maps: tuple[TensorMap, ...] = (),
    ) -> None:
        """Run it on the current stream of the first tensor's device.

        Pass any other tensor in place of an absent one, and a constexpr that says so. `maps` are for Gluon kernels,
        which have no interpreter. Raises TypeError if the kernel's parameters break the rules above.
        """
        if _interpreted:
            gate = {"USE_PDL": False} if "USE_PDL" in self._kernel.arg_names else {}
            self._kernel[grid](*tensors, *scalars, **self._constexprs, **gate)
            return
        pointers = tuple(map(_address, tensors))
        device = tensors[0].get_device()
        key = (device, *map(_dtype, tensors), *map(type, scalars))
        if functools.reduce(operator.or_, pointers) & _ALIGNMENT:
            key += tuple(pointer & _ALIGNMENT == 0 for pointer in pointers)
        if maps:
            key += tuple((each.base.dtype, each.block_shape) for each in maps)
        ready = self._ready.get(key)
        if ready is None:
            _check(self._kernel, (*maps, *tensors), scalars, self._constexprs)
            # Triton makes the first launch of a variant: it compiles, and returns what is run from then on.
            given = (*(each.checked() for each in maps), *tensors, *scalars)
            compiled = self._kernel[grid](*given, **self._constexprs, **self._options)
            self._ready[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = ready
        assert _raw_stream is not None
        arguments = (*maps, *pointers, *scalars, *self._places)
        run(*grid, _raw_stream(device), function, metadata, None, None, None, *arguments)


_configured: dict[tuple[Any, ...], Configured] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    scalars: tuple[float, ...] = (),
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    pdl: bool = True,
    fp_fusion: bool = True,
    **constexprs: Any,
) -> None:
    """Launch a kernel that is configured for this call; see `Configured`."""
    key = (id(kernel), num_warps, num_stages, pdl, fp_fusion, *constexprs.items())
    configured = _configured.get(key)
    if configured is None:
        configured = _configured[key] = Configured(
            kernel, num_warps=num_warps, num_stages=num_stages, pdl=pdl, fp_fusion=fp_fusion, **constexprs
        )
    configured(grid, tensors, scalars)


def _pdl_options(kernel: Any, pdl: bool) -> dict[str, Any]:
    if "USE_PDL" in kernel.arg_names:
        return PDL if pdl else {"USE_PDL": False}
    if pdl:
        raise TypeError(f"{kernel.__name__} has no constexpr USE_PDL, so it cannot be launched with pdl=True")
    return {}


def _check(
    kernel: Any,
    tensors: tuple[Tensor | TensorMap, ...],
    scalars: tuple[float, ...],
    constexprs: dict[str, Any],
) -> None:
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
