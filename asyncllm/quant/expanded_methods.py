"""Expansions of weights whose method multiplies them directly, for layers that this method does not support."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.kernels.scaled import GROUP
from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.expansion import Expansion, expansion_of_codes, expect
from asyncllm.quant.packed import Packed
from asyncllm.quant.scaled import Scaled
from asyncllm.quant.settings import Header

__all__ = ["expansion_of_method"]


def expansion_of_method(module: str, tensors: Mapping[str, Header], method: LinearMethod | None) -> Expansion | None:
    """Return the expansion of a module with these tensors, or None if its method has none or it is unquantized. Raises
    InvalidCheckpoint, UnsupportedModel."""
    if isinstance(method, Scaled) and method.scale is not None:
        return expansion_of_codes(
            module,
            tensors,
            scale=method.scale,
            block=(GROUP, GROUP) if method.layout == "block" else None,
            left_out=[] if method.input_suffix is None else [method.input_suffix],
        )
    if not isinstance(method, Packed):
        return None
    rows, columns = method.sizes(tensors)
    try:
        shapes = method.tensors(rows, columns)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{module}: {error}.") from None
    sources = {
        suffix: expect(module, tensors, suffix, sorted(method.stored(suffix).dtypes), shape)
        for suffix, shape in shapes.items()
    }
    expand = partial(_expand, method=method, rows=rows, columns=columns)
    return Expansion(f"{module}.weight", (rows, columns), sources, expand)


def _expand(tensors: Mapping[str, Tensor], *, method: Packed, rows: int, columns: int) -> Tensor:
    codes, scales, zeros, group_of = method.decode(tensors, rows, columns)
    if not scales.isfinite().all():
        raise InvalidCheckpoint("the scales of this weight are not all finite; download it again")
    if group_of is None:
        group_of = torch.arange(columns, device=codes.device) // (columns // len(scales))
    elif not bool(((group_of >= 0) & (group_of < len(scales))).all()):
        raise InvalidCheckpoint(f"its g_idx does not name one of {len(scales)} groups")
    return (codes.float() - zeros.float()[group_of].t()) * scales.float()[group_of].t()
