"""fp8 as AMD's Quark writes it (`quant_method` "quark")."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["Quark"]


@register("quark")
class Quark(Scheme):
    """`weight` in e4m3 with a `weight_scale`, of the tensor with an `input_scale`, or of each output feature."""

    def __init__(self, *, static: bool) -> None:
        self._static = static

    @classmethod
    def read(cls, settings: QuantSettings) -> Quark:
        for name in ("layer_quant_config", "layer_type_quant_config"):
            if settings.object(name).fields:
                settings.unsupported(name, "All layers of Quark's files are to be quantized alike.")
        settings.object("export").expect("weight_format", "real_quantized")
        usual = settings.object("global_quant_config")
        for name in ("output_tensors", "bias"):
            if usual.get(name) is not None:
                usual.unsupported(name, "Supported: weights, and the inputs of products.")
        weight, inputs = usual.object("weight"), usual.object("input_tensors")
        for each in (weight, inputs):
            if each.get("dtype") is None:
                usual.invalid(each.source.rpartition(".")[2], "where the settings of fp8 belong")
            each.expect("dtype", "fp8_e4m3")
            each.expect("qscheme", "per_tensor", "per_channel")
        weight.expect("is_dynamic", False)
        static = not inputs.flag("is_dynamic", False)
        if static != (inputs.get("qscheme") in (None, "per_tensor")):
            inputs.unsupported("qscheme", "Activations have a scale for each token, or one that the file holds.")
        return cls(static=static)

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "weight_scale" not in tensors and not holds_codes(tensors):
            return None
        return scaled(torch.float8_e4m3fn, "weight_scale", tensors, block=False, static=self._static)
