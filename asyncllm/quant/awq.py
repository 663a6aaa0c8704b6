"""AWQ, as AutoAWQ and LMDeploy write it: 4 bits, with a zero point for each group.

A weight is (code - zero) * scale. `gemm` packs output features in a permuted order; `gemv` packs input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.layers.linear_method import FLOATS, LinearMethod, Stored
from asyncllm.quant.packed import INT32_COLUMNS, INT32_ROWS, Decoded, Packed, pack, scale_dtype, shape_of, unpack
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["AWQ", "Gemm", "Gemv", "awq_settings", "encode_gemm"]

_LAYOUT_KEYS = ("version", "checkpoint_format", "format")

_BITS = 4
_IN_WORD = 32 // _BITS
_IN_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each output feature of eight, its position in the word of `gemm` that holds them."""
_MARKS = frozenset({"qweight", "qzeros", "scales"})


@dataclass(frozen=True)
class Gemm(Packed):
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]."""

    name: ClassVar[str] = "awq"

    def tensors(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        _divides(rows, "output features")
        groups = self.groups(columns)
        return {
            "qweight": (columns, rows // _IN_WORD),
            "qzeros": (groups, rows // _IN_WORD),
            "scales": (groups, rows),
        }

    def sizes(self, tensors: Mapping[str, Header]) -> tuple[int, int]:
        columns, words = shape_of(tensors, "qweight")
        return words * _IN_WORD, columns

    def stored(self, suffix: str) -> Stored:
        return FLOATS if suffix == "bias" else Stored(axis=1) if suffix == "scales" else INT32_COLUMNS

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Decoded:
        return Decoded(_in_order(tensors["qweight"]).t(), tensors["scales"], _in_order(tensors["qzeros"]))


@dataclass(frozen=True)
class Gemv(Packed):
    """qweight [N, K / 8], qzeros [N, Z], scales [N, 8 Z]. The groups are padded to 8 Z."""

    name: ClassVar[str] = "awq"

    def tensors(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        _divides(columns, "input features")
        words = -(-self.groups(columns) // _IN_WORD)
        multiple = {64: 2, 32: 4}.get(self.group_size, 1)
        padded = -(-words // multiple) * multiple
        return {
            "qweight": (rows, columns // _IN_WORD),
            "qzeros": (rows, padded),
            "scales": (rows, padded * _IN_WORD),
        }

    def sizes(self, tensors: Mapping[str, Header]) -> tuple[int, int]:
        rows, words = shape_of(tensors, "qweight")
        return rows, words * _IN_WORD

    def stored(self, suffix: str) -> Stored:
        return FLOATS if suffix in ("bias", "scales") else INT32_ROWS

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Decoded:
        groups = self.groups(columns)
        zeros = unpack(tensors["qzeros"], _BITS, 1)[:, :groups].t()
        return Decoded(unpack(tensors["qweight"], _BITS, 1), tensors["scales"][:, :groups].t(), zeros)


@register("awq")
class AWQ(Scheme):
    """The files show which modules are quantized; `modules_to_not_convert` lists unquantized modules."""

    def __init__(self, layout: type[Packed], group_size: int) -> None:
        self._layout = layout
        self._group_size = group_size

    @classmethod
    def read(cls, settings: QuantSettings) -> AWQ:
        bits = settings.integer("bits", "w_bit")
        if bits != _BITS:
            settings.unsupported("bits" if "bits" in settings.fields else "w_bit", "AWQ is of 4 bits.")
        if not settings.flag("zero_point", True):
            settings.unsupported("zero_point", "AWQ without zero points is not read.")
        # GPTQModel uses another key for the packing.
        key = next((each for each in _LAYOUT_KEYS if settings.get(each) is not None), _LAYOUT_KEYS[0])
        version = str(settings.get(key) or "gemm").lower()
        layouts: dict[str, type[Packed]] = {"gemm": Gemm, "gemv": Gemv}
        if version not in layouts:
            settings.unsupported(key, f"Supported: {', '.join(layouts)}.")
        return cls(layouts[version], settings.group_size("group_size", "q_group_size"))

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if not _MARKS & tensors.keys():
            return None
        return self._layout(_BITS, self._group_size, scale_dtype(tensors.get("scales")))


def encode_gemm(weight: Decoded) -> dict[str, Tensor]:
    """Return suffix -> tensor of `Gemm` for a weight of 4 bits. Scales are stored in float16."""

    def packed(codes: Tensor) -> Tensor:
        places = torch.tensor(_IN_ORDER, device=codes.device).argsort()
        return pack(codes.reshape(len(codes), -1, _IN_WORD)[:, :, places].flatten(1), _BITS, 1)

    _divides(len(weight.codes), "output features")
    return {
        "qweight": packed(weight.codes.t()),
        "qzeros": packed(weight.zeros),
        "scales": weight.scales.to(torch.float16).contiguous(),
    }


def awq_settings(group_size: int, plain: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of files written with `encode_gemm`. `plain`: the unquantized modules."""
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(plain),
    }


def _in_order(words: Tensor) -> Tensor:
    """Convert [A, N / 8] of `gemm` to [A, N]."""
    codes = unpack(words, _BITS, 1)
    return codes.view(len(codes), -1, _IN_WORD)[:, :, list(_IN_ORDER)].flatten(1)


def _divides(size: int, what: str) -> None:
    if size % _IN_WORD:
        raise InvalidCheckpoint(f"{size} {what} do not fill words of {_IN_WORD}")
