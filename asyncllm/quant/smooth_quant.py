"""LMDeploy's W8A8 (`lite smooth_quant`): int8 or fp8, with one scale for each output feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["SmoothQuant", "smooth_settings"]

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn}


@register("smooth_quant")
class SmoothQuant(Scheme):
    """`weight` in 8 bits and `scale` [N, 1]. The norms already include the smoothing factors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @classmethod
    def read(cls, settings: QuantSettings) -> SmoothQuant:
        settings.expect("quant_dtype", *_DTYPES)
        return cls(_DTYPES[settings.get("quant_dtype") or "int8"])

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "scale" not in tensors and not holds_codes(tensors):
            return None
        return scaled(self._dtype, "scale", tensors, block=False, static=False)


def smooth_settings(dtype: torch.dtype, plain: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of weights with a `scale` for each output feature."""
    return {
        "quant_method": "smooth_quant",
        "quant_dtype": "int8" if dtype == torch.int8 else "float8_e4m3fn",
        "modules_to_not_convert": list(plain),
    }
