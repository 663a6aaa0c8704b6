"""compressed-tensors, as llm-compressor writes it: groups of modules by name or class, each with its own format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.kernels.scaled import GROUP
from asyncllm.layers.linear_method import FLOATS, LinearMethod, Stored
from asyncllm.quant.expansion import Expansion, expansion_of_codes, modules_of
from asyncllm.quant.packed import INT32_ROWS, INT32_WHOLE, Decoded, Packed, pack, scale_dtype, shape_of, unpack
from asyncllm.quant.scaled import holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["CompressedTensors", "PackQuantized", "encode_packed", "packed_settings", "scaled_settings"]

_Kind = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
]

_KINDS: tuple[_Kind, ...] = get_args(_Kind)

_MARKS = frozenset({"weight_packed", "weight_scale", "weight_zero_point"})

_ORDERED = ("group", "dynamic")
"""Orders that have a weight_g_idx; both names stand for the same order."""

_INPUT_TENSORS = ("input_scale", "input_zero_point", "input_global_scale")
"""Tensors for rounding activations."""


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

    def sizes(self, tensors: Mapping[str, Header]) -> tuple[int, int]:
        rows, words = shape_of(tensors, "weight_packed")
        return rows, words * 32 // self.bits

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
    """`ignore` lists unquantized modules; other modules without quantized tensors in the files are unquantized too.

    Weights that are neither packed nor multiplied in 8 bits are expanded, and their activations are not rounded.
    """

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    @classmethod
    def read(cls, settings: QuantSettings) -> CompressedTensors:
        settings.expect("quantization_status", "compressed", "frozen")
        if settings.get("transform_config"):
            settings.unsupported("transform_config", "Weights that are turned first are not read.")
        if settings.object("sparsity_config").get("format") not in (None, "dense"):
            settings.unsupported("sparsity_config", "Sparse weights are not read.")
        named = settings.object("config_groups")
        groups = [_Group.read(named.object(name), settings) for name in named.fields]
        if not groups:
            settings.invalid("config_groups", "which names no module")
        return cls(groups)

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if not _MARKS & tensors.keys() and not holds_codes(tensors):
            return None
        group = self._group(module)
        weights = group.weights
        if group.kind == "pack-quantized":
            return PackQuantized(
                bits=weights.integer("num_bits"),
                group_size=_group_size(weights),
                scale_dtype=scale_dtype(tensors.get("weight_scale")),
                ordered=weights.get("actorder") in _ORDERED,
                symmetric=weights.flag("symmetric", True),
            )
        if group.expanded:
            # Its codes are missing, or have another format.
            raise InvalidCheckpoint(
                f"{short(module)} has {', '.join(tensors)}, which are not the tensors of {group.kind}. Download the "
                f"files again."
            )
        static = not group.inputs.flag("dynamic", False)
        dtype = torch.int8 if group.kind == "int-quantized" else torch.float8_e4m3fn
        return scaled(dtype, "weight_scale", tensors, block=weights.get("strategy") == "block", static=static)

    def expansions(
        self, headers: Mapping[str, Header], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> Iterator[Expansion]:
        if not any(group.expanded for group in self._groups):
            return
        for module, tensors in modules_of(headers).items():
            if "weight_packed" not in tensors and not holds_codes(tensors):
                continue
            group = self._group(module)
            if group.expanded:
                yield expansion_of_codes(
                    module,
                    tensors,
                    codes="weight_packed" if group.kind.endswith("pack-quantized") else "weight",
                    whole="weight_global_scale" if group.kind == "nvfp4-pack-quantized" else None,
                    divided=True,
                    zeros=group.kind == "int-quantized" and not group.weights.flag("symmetric", True),
                    block=_block(group.weights),
                    exponents=group.kind.startswith("mx"),
                    left_out=_INPUT_TENSORS,
                )

    def _group(self, module: str) -> _Group:
        """Return the first group that names the module, or otherwise the first that names linear layers."""
        for group in self._groups:
            if any(_names(target, module) for target in group.targets):
                return group
        for group in self._groups:
            if "Linear" in group.targets:
                return group
        raise InvalidCheckpoint(f"{module} is quantized, and config.json names it in none of its config_groups.")


class _Group(NamedTuple):
    """One of the config_groups."""

    targets: Sequence[str]
    kind: _Kind
    weights: QuantSettings
    inputs: QuantSettings
    """Settings of the activations; empty if these have 16 bits."""
    expanded: bool

    @staticmethod
    def read(group: QuantSettings, settings: QuantSettings) -> _Group:
        """Read a group. Raises InvalidCheckpoint, UnsupportedModel."""
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            group.invalid("targets", "where a list of names belongs")
        for target in targets:
            try:
                re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            except (re.error, RecursionError):
                group.invalid("targets", f"of which {short(target)} is not a regular expression")
        weights, inputs = group.object("weights"), group.object("input_activations")
        kind = group.get("format") or settings.get("format")
        if kind == "naive-quantized":
            kind = f"{weights.get('type')}-quantized"
        if kind not in _KINDS:
            named_in = group if group.get("format") else settings
            named_in.unsupported("format", f"Supported: {', '.join(_KINDS)}.")
        if kind == "pack-quantized":
            _check_packed(weights)
            return _Group(targets, kind, weights, inputs, expanded=False)
        if kind not in ("int-quantized", "float-quantized"):
            return _Group(targets, kind, weights, inputs, expanded=True)
        of_floats = kind == "float-quantized"
        weights.expect("type", "float" if of_floats else "int")
        weights.expect("num_bits", *((8,) if of_floats else range(2, 9)))
        weights.expect("strategy", "tensor", "channel", "group", "block")
        _block(weights)
        return _Group(targets, kind, weights, inputs, expanded=not _multiplies(weights, inputs, of_floats))


def _check_packed(weights: QuantSettings) -> None:
    """Raise UnsupportedModel for packed weights that are not supported."""
    weights.expect("type", "int")
    if weights.integer("num_bits") not in (4, 8):
        weights.unsupported("num_bits", "Supported: 4, 8.")
    weights.expect("strategy", "group", "channel")
    weights.expect("actorder", *_ORDERED, "weight", "static")
    weights.expect("dynamic", False)
    weights.flag("symmetric", True)
    _group_size(weights)


def _group_size(weights: QuantSettings) -> int:
    """Return the number of input features with one scale, or -1 for all. Without a strategy, group_size decides."""
    grouped = weights.get("strategy") == "group" or (weights.get("strategy") is None and weights.get("group_size"))
    return weights.group_size("group_size") if grouped else -1


def _block(weights: QuantSettings) -> tuple[int, int] | None:
    """Return the numbers of output and input features with one scale, or None for one scale per tensor or output
    feature. Raises InvalidCheckpoint."""
    strategy = weights.get("strategy")
    if strategy == "group":
        return 1, max(1, weights.integer("group_size"))
    if strategy != "block":
        return None
    given = weights.get("block_structure")
    sizes = given.lower().split("x") if isinstance(given, str) else (GROUP, GROUP) if given is None else given
    if not isinstance(sizes, Sequence) or len(sizes) != 2 or not all(str(each).isdecimal() for each in sizes):
        weights.invalid("block_structure", "where two sizes belong")
    return max(1, int(sizes[0])), max(1, int(sizes[1]))


def _multiplies(weights: QuantSettings, inputs: QuantSettings, of_floats: bool) -> bool:
    """Return whether products take 8-bit activations with these settings."""
    if not inputs.fields or inputs.get("type") not in (None, "float" if of_floats else "int"):
        return False
    if inputs.get("num_bits") not in (None, 8) or not inputs.flag("symmetric", True):
        return False
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic") is True
    if weights.get("strategy") == "block":
        in_groups = strategy in (None, "token") or (strategy == "group" and inputs.get("group_size") in (None, GROUP))
        return of_floats and dynamic and in_groups and _block(weights) == (GROUP, GROUP)
    if weights.get("strategy") == "group" or not weights.flag("symmetric", True):
        return False
    return strategy in (None, "token") if dynamic else of_floats and strategy in (None, "tensor")


def _names(target: str, module: str) -> bool:
    """Return whether the list entry `target` names the module, by a regular expression after "re:" or by the full
    name."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target


def encode_packed(weight: Decoded, bits: int, *, symmetric: bool) -> dict[str, Tensor]:
    """Return suffix -> tensor of `PackQuantized` for a weight with groups of adjacent features."""
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
    """Return the quantization_config of files written with `encode_packed`. `plain`: the unquantized modules."""
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
    """Return the quantization_config of 8-bit weights with a scale for each output feature, for activations with a
    scale for each token."""
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
