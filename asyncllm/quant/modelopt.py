"""fp8 as NVIDIA's ModelOpt writes it (`quant_method` "modelopt"), in config.json or in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["ModelOpt"]

_STATIC = {"FP8": True, "FP8_PER_CHANNEL_PER_TOKEN": False}
"""Whether the scales of activations are in the file."""


@register("modelopt")
class ModelOpt(Scheme):
    """`weight` in e4m3 with `weight_scale`, of the tensor with an `input_scale`, or of each output feature."""

    def __init__(self, *, static: bool) -> None:
        self._static = static

    @classmethod
    def read(cls, settings: QuantSettings) -> ModelOpt:
        inner = settings.object("quantization") if settings.get("quantization") is not None else settings
        inner.expect("quant_algo", *_STATIC)
        if inner.get("quant_algo") is None:
            inner.invalid("quant_algo", "where the name of one belongs")
        return cls(static=_STATIC[inner.get("quant_algo")])

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "weight_scale" not in tensors and not holds_codes(tensors):
            return None
        return scaled(torch.float8_e4m3fn, "weight_scale", tensors, block=False, static=self._static)
