"""fp8 and NVFP4, as NVIDIA's ModelOpt writes them (`quant_method` "modelopt"), in config.json or
hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from asyncllm.kernels.scaled import GROUP
from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.expansion import Expansion, expansion_of_codes, modules_of
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["ModelOpt"]

_STATIC = {"FP8": True, "FP8_PER_CHANNEL_PER_TOKEN": False}
"""Algorithm of 8-bit products -> whether the scales of activations are in the file."""
_EXPANDED = frozenset({"NVFP4", "W4A16_NVFP4", "MXFP8", "FP8_PB_WO"})
_MIXED = "MIXED_PRECISION"
"""`quantized_layers` assigns one of the other algorithms to each module, as the files show."""


@register("modelopt", "modelopt_fp4")
class ModelOpt(Scheme):
    """`weight` in e4m3 with `weight_scale`, per tensor with an `input_scale`, or per output feature.

    Weights of other kinds are expanded, and their activations are not rounded: NVFP4, which also has a `weight_scale_2`
    per tensor, MXFP8, and e4m3 in blocks.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm

    @classmethod
    def read(cls, settings: QuantSettings) -> ModelOpt:
        inner = settings.object("quantization") if settings.get("quantization") is not None else settings
        name = inner.get("quant_algo")
        if name is None:
            inner.invalid("quant_algo", "where the name of one belongs")
        known = (*_STATIC, *sorted(_EXPANDED), _MIXED)
        if not isinstance(name, str) or name.upper() not in known:
            inner.unsupported("quant_algo", f"Supported: {', '.join(known)}.")
        return cls(name.upper())

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "weight_scale" not in tensors and not holds_codes(tensors):
            return None
        static = _STATIC.get(self._algorithm, "input_scale" in tensors)
        return scaled(torch.float8_e4m3fn, "weight_scale", tensors, block=False, static=static)

    def expansions(
        self, headers: Mapping[str, Header], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> Iterator[Expansion]:
        if self._algorithm in _STATIC:
            return
        for module, tensors in modules_of(headers).items():
            dtype, scale = (tensors[each].dtype if each in tensors else "" for each in ("weight", "weight_scale"))
            if dtype == "U8":
                yield expansion_of_codes(module, tensors, whole="weight_scale_2", left_out=["input_scale"])
            elif dtype == "F8_E4M3" and (self._algorithm in _EXPANDED or scale == "U8"):
                yield expansion_of_codes(module, tensors, block=(GROUP, GROUP), left_out=["input_scale"])
