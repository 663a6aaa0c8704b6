"""GPTQ, as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits, with groups of adjacent features or by `g_idx`.

A weight is (code - zero) * scale. The first version of the format stores zero points minus one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.layers.linear_method import FLOATS, LinearMethod, Stored
from asyncllm.quant.packed import INT32_COLUMNS, INT32_WHOLE, Decoded, Packed, pack, scale_dtype, shape_of, unpack
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["GPTQ", "GPTQWeights", "encode_gptq", "gptq_settings"]

_MARKS = frozenset({"qweight", "qzeros", "scales", "g_idx"})
_FORMATS = {"gptq": True, "gptq_v2": False}
"""Whether zero points are stored minus one."""


@dataclass(frozen=True)
class GPTQWeights(Packed):
    """qweight [K bits / 32, N], qzeros [G, N bits / 32], scales [G, N] and usually g_idx [K]."""

    name: ClassVar[str] = "gptq"

    minus_one: bool = False
    has_borrows: bool = False
    """Whether one was subtracted from the zero points of a word as from one number, which borrows from the next zero
    point, as GPTQModel does."""
    has_groups: bool = True
    """Whether the file has a g_idx."""

    def tensors(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        for size, what in ((rows, "output"), (columns, "input")):
            if size * self.bits % 32:
                raise InvalidCheckpoint(f"{size} {what} features of {self.bits} bits do not fill words of 32")
        groups = self.groups(columns)
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (columns * self.bits // 32, rows),
            "qzeros": (groups, rows * self.bits // 32),
            "scales": (groups, rows),
        }
        return {**shapes, "g_idx": (columns,)} if self.has_groups else shapes

    def sizes(self, tensors: Mapping[str, Header]) -> tuple[int, int]:
        words, rows = shape_of(tensors, "qweight")
        return rows, words * 32 // self.bits

    def stored(self, suffix: str) -> Stored:
        known = {"bias": FLOATS, "scales": Stored(axis=1), "g_idx": INT32_WHOLE}
        return known.get(suffix, INT32_COLUMNS)

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Decoded:
        codes = unpack(tensors["qweight"], self.bits, 0).t()
        group_of = tensors["g_idx"].long() if self.has_groups else None
        if group_of is not None and not self.ordered:
            size = columns // self.groups(columns)
            if not torch.equal(group_of, torch.arange(columns, device=group_of.device) // size):
                raise InvalidCheckpoint("its g_idx is not in order, and config.json says desc_act = false")
            group_of = None
        return Decoded(codes, tensors["scales"], self._zeros(tensors["qzeros"]), group_of)

    def _zeros(self, words: Tensor) -> Tensor:
        if not self.minus_one:
            return unpack(words, self.bits, 1)
        if self.has_borrows:
            ones = sum(1 << place for place in range(0, 32, self.bits))
            return unpack((words.long() + ones).to(torch.int32), self.bits, 1)
        zeros = unpack(words, self.bits, 1)
        if (zeros == (1 << self.bits) - 1).any():
            raise InvalidCheckpoint(
                "the writer stored zero points of 0 less one, which damages their neighbours. Quantize the model "
                "again, in the format gptq_v2 or with sym = true"
            )
        return zeros + 1


@register("gptq")
class GPTQ(Scheme):
    """`dynamic` has other settings for modules that match a regular expression, or leaves them unquantized."""

    def __init__(self, fields: Mapping[str, Any], rules: Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]) -> None:
        self._fields = fields
        self._rules = rules

    @classmethod
    def read(cls, settings: QuantSettings) -> GPTQ:
        settings.expect("pack_dtype", "int32")
        settings.expect("is_marlin_format", False)
        return cls(_fields(settings), _rules(settings))

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if not _MARKS & tensors.keys():
            return None
        fields = next((fields for pattern, fields in self._rules if pattern.match(module)), self._fields)
        # Without g_idx, groups are of adjacent features, unless it is missing from a file that needs it.
        has_groups = "g_idx" in tensors or fields["ordered"]
        return GPTQWeights(
            **fields,
            has_groups=has_groups,
            stray_bias="bias" in tensors,
            scale_dtype=scale_dtype(tensors.get("scales")),
        )


def _fields(settings: QuantSettings) -> dict[str, Any]:
    """Return the `GPTQWeights` for these settings. Raises InvalidCheckpoint, UnsupportedModel."""
    bits = settings.integer("bits")
    if bits not in (2, 3, 4, 8):
        settings.unsupported("bits", "Supported: 2, 3, 4, 8.")
    name = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
    stored = settings.get(name)
    if stored is not None and (not isinstance(stored, str) or stored not in _FORMATS):
        settings.unsupported(name, f"Supported: {', '.join(_FORMATS)}.")
    size = settings.group_size("group_size")
    writer = settings.object("meta").get("quantizer")
    writers = writer if isinstance(writer, list) else [writer]
    minus_one = _FORMATS[stored or "gptq"]
    # A word does not hold a whole number of 3-bit codes, and no borrows cross words.
    by_words = any(isinstance(each, str) and each.startswith("gptqmodel") for each in writers)
    symmetric = settings.flag("sym", True)
    if minus_one and not symmetric and by_words and bits == 3:
        settings.unsupported("sym", "Of 3 bits with zero points, only the format gptq_v2 is read.")
    return {
        "bits": bits,
        "group_size": size,
        # A single group has no order.
        "ordered": settings.flag("desc_act", False) and size != -1,
        "minus_one": minus_one,
        "has_borrows": minus_one and by_words and not symmetric,
    }


def _rules(settings: QuantSettings) -> Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """Return GPTQModel's `dynamic` as (pattern, settings). The first pattern that matches the beginning of a module's
    name applies. Modules listed with "-:" are unquantized, as the files show. Raises InvalidCheckpoint,
    UnsupportedModel."""
    rules = []
    dynamic = settings.object("dynamic")
    for name in dynamic.fields:
        try:
            pattern = re.compile(name.removeprefix("+:").removeprefix("-:"))
        except (re.error, RecursionError):
            dynamic.invalid(name, "whose name is not a regular expression")
        own = dynamic.object(name)
        rules.append((pattern, _fields(QuantSettings({**settings.fields, **own.fields}, own.source))))
    return rules


def encode_gptq(weight: Decoded, bits: int) -> dict[str, Tensor]:
    """Return suffix -> tensor of the first format for a weight with groups of adjacent features. Scales are stored in
    float16.

    Zero points must be at least 1, since 0 minus one does not fit into the bits.
    """
    n, k = weight.codes.shape
    for size, what in ((n, "output"), (k, "input")):
        if size * bits % 32:
            raise InvalidCheckpoint(f"{size} {what} features of {bits} bits do not fill words of 32")
    if not weight.zeros.all():
        raise ValueError("a zero point of 0 cannot be stored less one")
    groups = len(weight.scales)
    return {
        "qweight": pack(weight.codes.t(), bits, 0),
        "qzeros": pack(weight.zeros - 1, bits, 1),
        "scales": weight.scales.to(torch.float16).contiguous(),
        "g_idx": torch.arange(k, dtype=torch.int32) // (k // groups),
    }


def gptq_settings(
    bits: int, group_size: int, *, symmetric: bool, damp_percent: float, quantized: Sequence[str], writer: str
) -> dict[str, Any]:
    """Return the quantization_config of files written with `encode_gptq`. `quantized`: names of quantized modules
    relative to a block, if others are unquantized; empty if all are quantized."""
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": symmetric,
        "lm_head": False,
        "true_sequential": False,
        "damp_percent": damp_percent,
        "checkpoint_format": "gptq",
        "meta": {"quantizer": [writer]},
    }
    return {**settings, "modules_in_block_to_quantize": [list(quantized)]} if quantized else settings
