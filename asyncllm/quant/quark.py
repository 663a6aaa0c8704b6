"""fp8 and MXFP4, as AMD's Quark writes them (`quant_method` "quark")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.expansion import Expansion, expansion_of_codes, modules_of
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["Quark"]

_FP8, _FP4 = "fp8_e4m3", "fp4"
_MX_GROUP = 32


@register("quark")
class Quark(Scheme):
    """`weight` in e4m3 with a `weight_scale`, per tensor with an `input_scale`, or per output feature; or pairs of e2m1
    with exponents in groups, which are expanded, without rounding of their activations.

    `layer_quant_config` has other settings for modules whose names match a shell pattern.
    """

    def __init__(self, *, static: bool, others: Mapping[str, bool]) -> None:
        self._static = static
        self._others = others

    @classmethod
    def read(cls, settings: QuantSettings) -> Quark:
        if settings.object("layer_type_quant_config").fields:
            settings.unsupported("layer_type_quant_config", "Supported: layers by their names (layer_quant_config).")
        settings.object("export").expect("weight_format", "real_quantized")
        named = settings.object("layer_quant_config")
        others = {name: _is_static(named.object(name)) for name in named.fields}
        return cls(static=_is_static(settings.object("global_quant_config")), others=others)

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "weight_scale" not in tensors and not holds_codes(tensors):
            return None
        static = next((each for name, each in self._others.items() if fnmatchcase(module, name)), self._static)
        return scaled(torch.float8_e4m3fn, "weight_scale", tensors, block=False, static=static)

    def expansions(
        self, headers: Mapping[str, Header], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> Iterator[Expansion]:
        for module, tensors in modules_of(headers).items():
            if "weight" in tensors and tensors["weight"].dtype == "U8":
                yield expansion_of_codes(module, tensors, left_out=["input_scale"])


def _is_static(settings: QuantSettings) -> bool:
    """Return whether the scales of activations are in the file. Raises InvalidCheckpoint, UnsupportedModel."""
    for name in ("output_tensors", "bias"):
        if settings.get(name) is not None:
            settings.unsupported(name, "Supported: weights, and the inputs of products.")
    weight, inputs = settings.object("weight"), settings.object("input_tensors")
    if weight.get("dtype") is None:
        settings.invalid("weight", "where the settings of fp8 or fp4 belong")
    weight.expect("dtype", _FP8, _FP4)
    weight.expect("is_dynamic", False)
    if weight.get("dtype") == _FP4:
        weight.expect("qscheme", "per_group")
        weight.expect("group_size", _MX_GROUP)
        weight.expect("scale_format", "e8m0")
        return False
    if inputs.get("dtype") is None:
        settings.invalid("input_tensors", "where the settings of fp8 belong")
    inputs.expect("dtype", _FP8)
    for each in (weight, inputs):
        each.expect("qscheme", "per_tensor", "per_channel")
    static = not inputs.flag("is_dynamic", False)
    if static != (inputs.get("qscheme") in (None, "per_tensor")):
        inputs.unsupported("qscheme", "Activations have a scale for each token, or one that the file holds.")
    return static
