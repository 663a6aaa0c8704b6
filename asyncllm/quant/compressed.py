"""compressed-tensors, as llm-compressor writes it: groups of modules by name or class, each with its own format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.kernels.scaled import GROUP
from asyncllm.layers.linear_method import FLOATS, LinearMethod, Stored
from asyncllm.quant.packed import INT32_ROWS, INT32_WHOLE, Decoded, Packed, pack, scale_dtype, unpack
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["CompressedTensors", "PackQuantized", "encode_packed", "packed_settings", "scaled_settings"]

_Kind = Literal["pack-quantized", "int-quantized", "float-quantized"]

_MARKS = frozenset({"weight_packed", "weight_scale", "weight_zero_point"})


@dataclass(frozen=True)
class PackQuantized(Packed):
    """weight_packed [N, K bits / 32], weight_scale [N, G], weight_zero_point [N bits / 32, G], weight_shape [2]."""

    name: ClassVar[str] = "compressed-tensors"

    symmetric: bool = True

    def tensors(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        if columns * self.bits % 32 or (rows * self.bits % 32 and not self.symmetric):
            raise InvalidCheckpoint(f"{rows} x {columns} numbers of {self.bits} bits do not fill words of 32")
        groups = self.groups(columns)
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (rows, columns * self.bits // 32),
            "weight_scale": (rows, groups),
            "weight_shape": (2,),
        }
        if not self.symmetric:
            shapes["weight_zero_point"] = (rows * self.bits // 32, groups)
        return {**shapes, "weight_g_idx": (columns,)} if self.ordered else shapes

    def stored(self, suffix: str) -> Stored:
        known = {
            "weight_packed": INT32_ROWS,
            "weight_zero_point": INT32_ROWS,
            "weight_shape": Stored(frozenset({"I64", "I32"}), axis=None),
            "weight_g_idx": INT32_WHOLE,
        }
        return known.get(suffix, FLOATS)

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Decoded:
        shape = tensors["weight_shape"].tolist()
        # One tensor may hold several parts.
        if shape[0] < rows or shape[1] != columns:
            raise InvalidCheckpoint(f"weight_shape is {shape}, and config.json asks for {[rows, columns]}")
        codes, scales = unpack(tensors["weight_packed"], self.bits, 1), tensors["weight_scale"].t()
        if self.symmetric:
            zeros = codes.new_full(scales.shape, 1 << (self.bits - 1))
        else:
            zeros = unpack(tensors["weight_zero_point"], self.bits, 0).t()
        return Decoded(codes, scales, zeros, tensors["weight_g_idx"].long() if self.ordered else None)


@register("compressed-tensors")
class CompressedTensors(Scheme):
    """`ignore` lists plain modules; other modules without quantized tensors in the files are plain too."""

    def __init__(self, groups: list[tuple[list[str], _Kind, QuantSettings]]) -> None:
        self._groups = groups

    @classmethod
    def read(cls, settings: QuantSettings) -> CompressedTensors:
        settings.expect("quantization_status", "compressed", "frozen")
        if settings.get("transform_config"):
            settings.unsupported("transform_config", "Weights that are turned first are not read.")
        if settings.object("sparsity_config").get("format") not in (None, "dense"):
            settings.unsupported("sparsity_config", "Sparse weights are not read.")
        whole = settings.get("format")
        groups = []
        named = settings.object("config_groups")
        for name in named.fields:
            group = named.object(name)
            targets = group.get("targets")
            if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
                group.invalid("targets", "where a list of names belongs")
            kind = group.get("format") or whole
            if kind == "naive-quantized":
                kind = f"{group.object('weights').get('type')}-quantized"
            if kind not in tuple(_CHECKS):
                named_in = group if group.get("format") else settings
                named_in.unsupported("format", f"Supported: {', '.join(_CHECKS)}.")
            _CHECKS[kind](group)
            groups.append((targets, kind, group))
        if not groups:
            settings.invalid("config_groups", "which names no module")
        return cls(groups)

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if not _MARKS & tensors.keys() and not holds_codes(tensors):
            return None
        kind, group = self._group(module)
        weights = group.object("weights")
        if kind == "pack-quantized":
            return PackQuantized(
                bits=weights.integer("num_bits"),
                group_size=_group_size(weights),
                scale_dtype=scale_dtype(tensors.get("weight_scale")),
                ordered=weights.get("actorder") == "group",
                symmetric=weights.flag("symmetric", True),
            )
        static = not group.object("input_activations").flag("dynamic", False)
        dtype = torch.int8 if kind == "int-quantized" else torch.float8_e4m3fn
        return scaled(dtype, "weight_scale", tensors, block=weights.get("strategy") == "block", static=static)

    def _group(self, module: str) -> tuple[_Kind, QuantSettings]:
        """Return the first group that names the module, or else the first that names linear layers."""
        for targets, kind, group in self._groups:
            if any(_names(target, module) for target in targets):
                return kind, group
        for targets, kind, group in self._groups:
            if "Linear" in targets:
                return kind, group
        raise InvalidCheckpoint(f"{module} is quantized, and config.json names it in none of its config_groups.")


def _check_packed(group: QuantSettings) -> None:
    """Raise UnsupportedModel for packed weights that are not read."""
    weights = group.object("weights")
    if group.get("input_activations") is not None:
        group.unsupported("input_activations", "Packed weights are for activations of 16 bits.")
    weights.expect("type", "int")
    if weights.integer("num_bits") not in (4, 8):
        weights.unsupported("num_bits", "Supported: 4, 8.")
    weights.expect("strategy", "group", "channel")
    weights.expect("actorder", "group", "weight", "static")
    weights.expect("dynamic", False)
    weights.flag("symmetric", True)
    _group_size(weights)


def _group_size(weights: QuantSettings) -> int:
    """Return the number of input features with one scale; -1 for all. Without a strategy, group_size decides."""
    grouped = weights.get("strategy") == "group" or (weights.get("strategy") is None and weights.get("group_size"))
    return weights.group_size("group_size") if grouped else -1


def _check_scaled(group: QuantSettings) -> None:
    """Raise UnsupportedModel for weights and activations of 8 bits that are not read."""
    kind = "float" if group.object("weights").get("type") == "float" else "int"
    weights, inputs = group.object("weights"), group.object("input_activations")
    if group.get("input_activations") is None:
        group.unsupported("input_activations", "Weights of 8 bits are for activations of 8 bits.")
    for each in (weights, inputs):
        each.expect("type", kind)
        each.expect("num_bits", 8)
        each.expect("symmetric", True)
    weights.expect("strategy", "tensor", "channel", *(["block"] if kind == "float" else []))
    if weights.get("strategy") == "block":
        weights.expect("block_structure", [GROUP, GROUP], f"{GROUP}x{GROUP}")
        inputs.expect("strategy", "group")
        inputs.expect("group_size", GROUP)
        inputs.expect("dynamic", True)
    else:
        inputs.expect("strategy", "token", "tensor")
        if kind == "int":
            inputs.expect("dynamic", True)
        if inputs.get("strategy") == "tensor" and inputs.flag("dynamic", False):
            inputs.unsupported("strategy", "Activations have a scale for each token, or one that the file holds.")
        if inputs.get("strategy") == "token" and not inputs.flag("dynamic", False):
            inputs.unsupported("dynamic", "Scales for each token are found as tokens come.")


_CHECKS: Mapping[_Kind, Callable[[QuantSettings], None]] = {
    "pack-quantized": _check_packed,
    "int-quantized": _check_scaled,
    "float-quantized": _check_scaled,
}


def _names(target: str, module: str) -> bool:
    """Return whether `target` of a list names the module: by a regular expression behind "re:", or by its full
    name."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target


def encode_packed(weight: Decoded, bits: int, *, symmetric: bool) -> dict[str, Tensor]:
    """Return suffix -> tensor of `PackQuantized` for a weight with groups of neighbours."""
    n, k = weight.codes.shape
    if k * bits % 32 or (n * bits % 32 and not symmetric):
        raise InvalidCheckpoint(f"{n} x {k} numbers of {bits} bits do not fill words of 32")
    tensors = {
        "weight_packed": pack(weight.codes, bits, 1),
        "weight_scale": weight.scales.t().contiguous(),
        "weight_shape": torch.tensor([n, k]),
    }
    return tensors if symmetric else {**tensors, "weight_zero_point": pack(weight.zeros.t(), bits, 0)}


def packed_settings(bits: int, group_size: int, *, symmetric: bool, plain: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of files of `encode_packed`; `plain` are the modules that are not quantized."""
    whole = group_size == -1
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else group_size,
        "dynamic": False,
        "actorder": None,
    }
    return _settings("pack-quantized", weights, None, plain)


def scaled_settings(dtype: torch.dtype, plain: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of weights of 8 bits with a scale for each output feature, for activations with
    one for each token."""
    shared = {"num_bits": 8, "type": "int" if dtype == torch.int8 else "float", "symmetric": True}
    weights = {**shared, "strategy": "channel", "dynamic": False}
    inputs = {**shared, "strategy": "token", "dynamic": True}
    return _settings("int-quantized" if dtype == torch.int8 else "float-quantized", weights, inputs, plain)


def _settings(
    kind: _Kind, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, plain: Sequence[str]
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": kind}},
        "ignore": list(plain),
        "kv_cache_scheme": None,
    }
