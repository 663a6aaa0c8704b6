"""Expand weights whose format no product here supports: convert them to ordinary tensors while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.kernels.e2m1 import E2M1, E8M0_BIAS
from asyncllm.quant.settings import Header

__all__ = ["Expansion", "expansion_of_codes", "expect", "halves", "modules_of"]

_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
"""dtypes of scales that are powers of two, one byte each."""
_NAN = 255
"""The code for NaN among them."""
_NVFP4_GROUP, _MX_GROUP = 16, 32
"""Number of input features with one scale."""

Block = tuple[int, int]
"""Numbers of output and input features with one scale."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """An ordinary tensor that replaces several tensors of the files."""

    name: str
    shape: tuple[int, ...]
    sources: Mapping[str, str]
    """Suffix -> name of a source tensor."""
    expand: Callable[[Mapping[str, Tensor]], Tensor]
    """Suffix -> tensor to the expanded tensor, float32. Raises InvalidCheckpoint for impossible values."""
    left_out: Sequence[str] = ()
    """Names of unused tensors, needed only to round activations."""


def modules_of(headers: Mapping[str, Header]) -> Mapping[str, Mapping[str, Header]]:
    """Return module -> suffix -> header, for tensors named by a module and a suffix."""
    found: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        module, _, suffix = name.rpartition(".")
        found.setdefault(module, {})[suffix] = header
    return found


def expect(
    module: str, tensors: Mapping[str, Header], suffix: str, dtypes: Sequence[str], *shapes: Sequence[int]
) -> str:
    """Return the name of a tensor that must have one of these dtypes and, if given, one of these shapes. Raises
    InvalidCheckpoint if it is missing or has another shape, UnsupportedModel for another dtype."""
    name, header = f"{module}.{suffix}", tensors.get(suffix)
    if header is None:
        raise InvalidCheckpoint(f"tensor {short(name)} is missing. Download the files again.")
    if header.dtype not in dtypes:
        raise UnsupportedModel(f"tensor {short(name)} is {header.dtype}, where {' or '.join(dtypes)} is read.")
    if shapes and header.shape not in [tuple(each) for each in shapes]:
        raise InvalidCheckpoint(
            f"tensor {short(name)} has shape {short(list(header.shape))}, and the weight that it belongs to asks for "
            f"{' or '.join(str(list(each)) for each in shapes)}. Check that config.json belongs to these weights."
        )
    return name


def halves(codes: Tensor, *, high_first: bool = False) -> Tensor:
    """Split uint8 [..., B], two 4-bit numbers each, to uint8 [..., 2 B]."""
    pair = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    return torch.stack(pair, -1).flatten(-2)


def expansion_of_codes(
    module: str,
    tensors: Mapping[str, Header],
    *,
    codes: str = "weight",
    scale: str = "weight_scale",
    whole: str | None = None,
    divided: bool = False,
    zeros: bool = False,
    block: Block | None = None,
    exponents: bool = False,
    left_out: Sequence[str] = (),
) -> Expansion:
    """Return the expanded weight of a module with `codes` and a `scale`, or of all experts in one tensor.

    Codes are pairs of e2m1 in groups of 16 (NVFP4) or, if scales are exponents, of 32 (MXFP4); e4m3 or int8 with one
    scale per tensor, output feature or `block`; or e4m3 with exponents in groups of 32 (MXFP8). `whole`: an additional
    scale of the whole tensor, by which the others are multiplied, or divided if `divided`. `zeros`: codes are integers
    with a `weight_zero_point`. `exponents`: scales of another kind are refused. Raises InvalidCheckpoint,
    UnsupportedModel.
    """
    sources = {codes: expect(module, tensors, codes, ("U8", "F8_E4M3", "I8"))}
    stored = tensors[codes]
    if len(stored.shape) not in (2, 3):
        raise InvalidCheckpoint(f"tensor {short(sources[codes])} has shape {list(stored.shape)}, and is not a matrix.")
    paired = stored.dtype == "U8"
    experts, rows, columns = stored.shape[:-2], stored.shape[-2], stored.shape[-1] * (2 if paired else 1)
    exponents = exponents or (scale in tensors and tensors[scale].dtype in _EXPONENTS)
    if paired or exponents:
        block = (1, _MX_GROUP if exponents else _NVFP4_GROUP)
    shapes: list[Sequence[int]] = [(*experts, rows), (*experts, rows, 1)]
    if not experts:
        shapes += [(), (1,)]
    if block is not None:
        many = tuple(-(-size // each) for size, each in zip((rows, columns), block, strict=True))
        # ModelOpt adds an axis for the contents of each block.
        shapes = [(*experts, *many), (*experts, many[0], 1, many[1], 1)]
    dtypes = _EXPONENTS if exponents else ("F8_E4M3",) if paired else _FLOATS
    sources[scale] = expect(module, tensors, scale, dtypes, *shapes)
    if whole is not None:
        sources[whole] = expect(module, tensors, whole, ("F32",), (), (1,))
    if zeros:
        shape = tensors[scale].shape
        sources["weight_zero_point"] = expect(module, tensors, "weight_zero_point", ("I8",), shape)
    names = [f"{module}.{suffix}" for suffix in left_out if suffix in tensors]
    expand = partial(_expand, codes=codes, scale=scale, whole=whole, divided=divided, block=block)
    return Expansion(f"{module}.weight", (*experts, rows, columns), sources, expand, names)


def _expand(
    tensors: Mapping[str, Tensor], *, codes: str, scale: str, whole: str | None, divided: bool, block: Block | None
) -> Tensor:
    stored = tensors[codes]
    if stored.dtype == torch.uint8:
        table = torch.tensor(E2M1, device=stored.device)
        values = table[halves(stored).int()]
    else:
        values = stored.float()
    scales = _numbers(tensors[scale])
    if whole is not None:
        scales = scales / tensors[whole].float() if divided else scales * tensors[whole].float()
        if not (scales.isfinite().all() and tensors[whole].isfinite().all()):
            raise InvalidCheckpoint("the others cannot be multiplied by the scale of the whole weight")
    if "weight_zero_point" in tensors:
        values = values - _spread(tensors["weight_zero_point"].float(), values, block)
    return values * _spread(scales, values, block)


def _numbers(scales: Tensor) -> Tensor:
    if scales.element_size() == 1 and scales.dtype != torch.float8_e4m3fn:
        exponents = scales.view(torch.uint8)
        if (exponents == _NAN).any():
            raise InvalidCheckpoint("the scales of this weight are not all numbers; download it again")
        return torch.ldexp(torch.ones(exponents.shape, device=scales.device), exponents.int() - E8M0_BIAS)
    if not scales.float().isfinite().all():
        raise InvalidCheckpoint("the scales of this weight are not all finite; download it again")
    return scales.float()


def _spread(numbers: Tensor, weight: Tensor, block: Block | None) -> Tensor:
    """Return numbers per tensor, output feature or block in a shape that multiplies the weight."""
    *experts, rows, columns = weight.shape
    if block is None:
        return numbers.reshape(*experts, -1, 1)
    many = numbers.reshape(*experts, -(-rows // block[0]), -1)
    return many.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
