"""Functions that every kernel needs besides `triton.language`: exact rounding and dots under the interpreter, and PDL.

With TRITON_INTERPRET=1 kernels run on a CPU, which is how they are tested on machines without a GPU. There, bfloat16
arithmetic and conversion to bfloat16 give wrong numbers (Triton 3.6 to 3.9). Kernels therefore convert to float32 right
after a load, compute in float32, and round and multiply matrices through the functions below.

PDL is programmatic dependent launch (CUDA 12, compute capability 9.0): a kernel launched with `launch_pdl=True` may
start while its predecessor drains, and must call `wait_for_producers` before it reads or writes anything that another
kernel writes or reads. It calls `release_consumers` right after that, which lets the blocks of the next kernel be
scheduled and wait. If kernels released before their wait, several would queue up in the multiprocessors: a decode step
of one row of Llama-3-8B then takes 4.08 ms instead of 3.94 ms. Only products of few tokens, and what comes between a
norm and such a product, release first, because products can prefetch weights before the wait.

When a kernel that releases after its wait has released the next one, all kernels before it have finished. The next one
may therefore read their results without a wait, and run at the same time (`linear/adapted.py`). It still has to wait in
some program before it ends, since its own consumers wait only for it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = [
    "INTERPRET",
    "PDL",
    "dot",
    "e4m3_bits",
    "e4m3_value",
    "nearest_integer",
    "release_consumers",
    "round_to",
    "wait_for_producers",
]

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def _supports_pdl() -> bool:
    return not INTERPRET.value and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


PDL: dict[str, Any] = {"USE_PDL": True, "launch_pdl": True} if _supports_pdl() else {"USE_PDL": False}
"""Launch options of a kernel that has a constexpr USE_PDL and calls `wait_for_producers(USE_PDL)`."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32. a [M, K], b [K, N] of one 16-bit or 32-bit type, acc [M, N] float32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> dtype (float32, float16 or bfloat16), to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # NaN must stay NaN: rounding up its mantissa could carry into the sign.
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def nearest_integer(x):
    """Round to the nearest integer, ties to even, for magnitudes below 2^22: the sum has no bits left for a
    fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_bits(x):
    """Convert float32 within 448 to the byte of the nearest e4m3 number, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 255).to(tl.int32) - 127, -6)
    # Three fraction bits: the magnitude in steps of 2^(exponent - 3) is below 16, or below 8 if it is subnormal.
    per_step = ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    steps = nearest_integer(tl.where(x == x, tl.abs(x), 0.0) * per_step).to(tl.int32)
    code = ((exponent + 7) << 3) + steps - 8
    return tl.where(x == x, code | ((bits >> 31) << 7).to(tl.int32), 0x7F).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """Return the float32 value of an e4m3 byte."""
    magnitude = (code & 127).to(tl.int32)
    exponent = magnitude >> 3
    steps = tl.where(exponent > 0, 8 + (magnitude & 7), magnitude & 7).to(tl.float32)
    step = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    value = tl.where(magnitude == 127, float("nan"), steps * step)
    return tl.where(code >= 128, -value, value)


@triton.jit
def wait_for_producers(USE_PDL: tl.constexpr):
    """Block until all earlier kernels have finished and their writes are visible."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_consumers(USE_PDL: tl.constexpr):
    """Let the next kernel's blocks be scheduled. It still waits for this kernel to finish before it touches data."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
