"""The method of low-bit weights with 16-bit activations: codes, scales and zero points in groups.

A file format is a subclass that names the tensors of a part and decodes them. The layer holds a `kernels.PackedWeight`
for every format.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.kernels import PackedWeight
from asyncllm.kernels.packed import PLANE, chunk_of, expand_stack, natural, pack_codes
from asyncllm.layers.layer import PartKey
from asyncllm.layers.linear_method import (
    Activation,
    LinearMethod,
    Stored,
    Weighted,
    frozen_parameter,
    of_expert,
    of_heads,
)
from asyncllm.quant.settings import Header

__all__ = [
    "INT32_COLUMNS",
    "INT32_ROWS",
    "INT32_WHOLE",
    "Decoded",
    "Packed",
    "pack",
    "scale_dtype",
    "shape_of",
    "unpack",
]

_SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}

_GROUP_MULTIPLE = 32
"""The number of input features of a group is a multiple of this in every format."""

_INT32 = frozenset({"I32"})
INT32_ROWS = Stored(_INT32, axis=0)
INT32_COLUMNS = Stored(_INT32, axis=1)
INT32_WHOLE = Stored(_INT32, axis=None)


class Decoded(NamedTuple):
    """A part of a weight: N output features by K input features."""

    codes: Tensor
    """uint8 [N, K]"""
    scales: Tensor
    """[G, N]"""
    zeros: Tensor
    """uint8 [G, N]"""
    group_of: Tensor | None = None
    """int64 [K]: the group of each input feature; None: groups of adjacent features."""


class _State(Protocol):
    """The method's state in a layer."""

    words: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None
    offset: Tensor | None
    size: int
    """Number of input features in a group."""
    pending: dict[tuple[str | None, int | None], dict[str, Tensor]]
    """(part, expert) -> tensors of a part of which others are still missing."""
    ordered_parts: dict[int | None, set[str | None]]
    """Expert -> parts stored in the layer's order of input features, until all are."""


def _state(layer: Weighted) -> _State:
    return cast(_State, layer)


@dataclass(frozen=True)
class Packed(LinearMethod):
    """Codes of `bits` bits in groups of `group_size` input features, -1 for one group. Methods are compared by
    value."""

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    ordered: bool = False
    """Whether the input features of a group need not be adjacent."""
    stray_bias: bool = False
    """Whether the file has a zero bias for layers without a bias."""
    invariant: bool = False

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return suffix -> shape of the tensors of a part with these output and input features, without the bias.

        Raises InvalidCheckpoint for sizes that the format cannot store.
        """

    @abstractmethod
    def sizes(self, tensors: Mapping[str, Header]) -> tuple[int, int]:
        """Return the numbers of output and input features of a part with these tensors; 0 for unknown ones."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Decoded:
        """Decode the tensors of a part. Raises InvalidCheckpoint for impossible values."""

    @property
    def stored_bits(self) -> int:
        """The number of bits per code in the layer."""
        return 8 if self.bits == 8 else 4

    @property
    def replaceable(self) -> bool:
        return False

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"scales": self.scale_dtype}

    def groups(self, columns: int) -> int:
        """Return the number of groups of input features. Raises InvalidCheckpoint unless the group size divides
        them."""
        if self.group_size == -1:
            return 1
        if columns % self.group_size:
            raise InvalidCheckpoint(f"group_size = {self.group_size} does not divide {columns} input features")
        return columns // self.group_size

    def create(self, layer: Weighted) -> None:
        if layer.num_experts is not None and layer.has_bias:
            raise UnsupportedModel(
                "Experts of few bits with biases are not implemented. Use the checkpoint in bfloat16."
            )
        stack = () if layer.num_experts is None else (layer.num_experts,)
        n, k = layer.out_features, layer.in_features
        own = _state(layer)
        own.size = self._size(layer)
        groups, chunks = k // own.size, -(-k // chunk_of(self.stored_bits))
        own.words = frozen_parameter(*stack, chunks, n, PLANE, dtype=torch.int16)
        own.scales = frozen_parameter(*stack, groups, n, dtype=self.scale_dtype)
        own.zeros = frozen_parameter(*stack, groups, n, dtype=torch.uint8)
        own.order = frozen_parameter(*stack, k, dtype=torch.int64) if self.ordered else None
        own.offset = frozen_parameter(*stack, n) if layer.has_bias else None
        own.pending, own.ordered_parts = {}, {}

    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        parts: dict[PartKey, tuple[int, ...]] = {}
        for part, rows in layer.rows.items():
            size = rows.stop - rows.start
            shapes = dict(self.tensors(size, layer.in_features))
            if layer.has_bias or self.stray_bias:
                shapes["bias"] = (size,)
            for index in (None,) if layer.num_experts is None else range(layer.num_experts):
                parts |= {(suffix, part, index): shape for suffix, shape in shapes.items()}
        return parts

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        own, (size, columns) = _state(layer), layer.whole_shapes[part]
        if suffix == "bias":
            if own.offset is not None:
                of_expert(own.offset, index)[layer.rows[part]] = layer.own_bias(part, tensor)
            elif tensor.any():
                raise InvalidCheckpoint("a bias for a layer that config.json builds without one, and it is not zero")
            return
        waiting = own.pending.setdefault((part, index), {})
        waiting[suffix] = tensor.to(own.words.device, copy=True)
        if waiting.keys() >= self.tensors(size, columns).keys():
            del own.pending[part, index]
            self._store(layer, self.decode(waiting, size, columns), part, index)

    def batch_invariant(self) -> LinearMethod:
        return replace(self, invariant=True)

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        bias = _state(layer).offset
        if self.invariant:
            return kernels.linear_invariant(x, natural(self.weight(layer), x.dtype), bias, out=out)
        return kernels.linear_packed(x, self.weight(layer), bias, out=out)

    def product_gated(self, layer: Weighted, x: Tensor, activation: Activation) -> Tensor | None:
        if self.invariant or activation != "silu" or _state(layer).offset is not None:
            return None
        return kernels.linear_packed_silu_mul(x, self.weight(layer))

    def embed(self, layer: Weighted, ids: Tensor, scale: float | None) -> Tensor:
        raise UnsupportedModel("A token embedding of few bits is not implemented. Use a checkpoint that keeps it.")

    def experts(
        self,
        gate_up: Weighted,
        down: Weighted,
        x: Tensor,
        weights: Tensor,
        expert_ids: Tensor,
        *,
        limit: float | None = None,
    ) -> Tensor:
        if limit is not None:
            raise UnsupportedModel("Experts of few bits support only SwiGLU. Use the checkpoint in bfloat16.")
        if self.invariant:
            first, second = (expand_stack(self.weight(each), x.dtype) for each in (gate_up, down))
            return kernels.fused_experts_invariant(x, first, second, weights, expert_ids)
        return kernels.packed_experts(x, self.weight(gate_up), self.weight(down), weights, expert_ids)

    def product_by_head(
        self, layer: Weighted, x: Tensor, features: slice, *, transposed: bool = False, out: Tensor | None = None
    ) -> Tensor:
        heads = of_heads(natural(self.weight(layer), x.dtype), layer, features, transposed)
        product = kernels.linear_by_head_invariant if self.invariant else kernels.linear_by_head
        return product(x, heads, out=out)

    def weight(self, layer: Weighted) -> PackedWeight:
        """Return the layer's packed weight."""
        own = _state(layer)
        return PackedWeight(own.words, own.scales, own.zeros, own.order, self.stored_bits, own.size, layer.in_features)

    def _size(self, layer: Weighted) -> int:
        """Return the size of the layer's groups. If ranks divide the input features, a group that two ranks share
        becomes several smaller groups with the same scale. Raises InvalidCheckpoint, UnsupportedModel."""
        whole = next(columns for _, columns in layer.whole_shapes.values())
        self.groups(whole)
        k = layer.in_features
        if k < whole and self.ordered:
            raise UnsupportedModel(
                "tp: the groups of these weights are of input features that are not adjacent (desc_act, actorder), so "
                "that each rank would have a part of every group. Use tp=1, or a checkpoint without."
            )
        if self.group_size == -1:
            return k
        size = math.gcd(self.group_size, k)
        if size % _GROUP_MULTIPLE:
            raise UnsupportedModel(
                f"tp: of {whole} input features in groups of {self.group_size} a rank would have {k}, and its groups "
                f"no multiple of {_GROUP_MULTIPLE}. Use a smaller tp."
            )
        return size

    def _store(self, layer: Weighted, decoded: Decoded, part: str | None, index: int | None) -> None:
        own, rows = _state(layer), layer.rows[part]
        codes, scales, zeros, group_of = decoded
        taken, columns = layer.own_rows(part), layer.own_columns()
        if isinstance(taken, Tensor):
            taken = taken.to(codes.device)
        codes, scales, zeros = codes[taken][:, columns], scales[:, taken], zeros[:, taken]
        if self.group_size != -1:
            groups = slice(columns.start // own.size, columns.stop // own.size)
            scales, zeros = (each.repeat_interleave(self.group_size // own.size, 0)[groups] for each in (scales, zeros))
        # Without a zero point, AutoRound writes negative scales for groups whose value of largest magnitude is
        # positive.
        if not scales.isfinite().all():
            raise InvalidCheckpoint("the scales of this weight are not all finite; download it again")
        if group_of is not None:
            assert own.order is not None
            order, place = _order(group_of, scales.shape[0]), of_expert(own.order, index)
            others = own.ordered_parts.setdefault(index, set())
            if others and not torch.equal(place, order):
                raise InvalidCheckpoint("its g_idx is not that of the other projections of the same input")
            place.copy_(order)
            codes = codes[:, order]
            others.add(part)
            if len(others) == len(layer.rows):
                del own.ordered_parts[index]
        of_expert(own.words, index)[:, rows] = pack_codes(codes, self.stored_bits)
        of_expert(own.scales, index)[:, rows] = scales
        of_expert(own.zeros, index)[:, rows] = zeros


def scale_dtype(header: Header | None) -> torch.dtype:
    """Return the dtype of the scales: the file's, since a conversion to the model's would change every weight of a
    group."""
    return _SCALE_DTYPES.get("" if header is None else header.dtype, torch.float32)


def shape_of(tensors: Mapping[str, Header], suffix: str) -> tuple[int, int]:
    """Return the shape of a matrix; zeros if there is none."""
    header = tensors.get(suffix)
    return (0, 0) if header is None or len(header.shape) != 2 else (header.shape[0], header.shape[1])


def unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """Unpack numbers of `bits` bits, stored consecutively in int32 words from the lowest bit, along `axis` of a matrix.
    Returns uint8, longer along that axis."""
    words = words.movedim(axis, 0)
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device).view(1, -1, 1)
        codes = ((words.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(0, 1)
    else:
        shifts = torch.arange(32, dtype=torch.int32, device=words.device).view(1, -1, 1)
        each = ((words.unsqueeze(1) >> shifts) & 1).to(torch.uint8).reshape(-1, bits, words.shape[1])
        places = torch.arange(bits, dtype=torch.uint8, device=words.device).view(1, -1, 1)
        codes = (each << places).sum(1, dtype=torch.uint8)
    return codes.movedim(0, axis)


def pack(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Return the inverse of `unpack`, contiguous: uint8 -> int32 words, for 2, 4 and 8 bits."""
    per_word = 32 // bits
    rows = codes.movedim(axis, 0)
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=codes.device).view(1, -1, 1)
    words = (rows.reshape(len(rows) // per_word, per_word, -1).long() << shifts).sum(1)
    return words.to(torch.int32).movedim(0, axis).contiguous()


def _order(group_of: Tensor, groups: int) -> Tensor:
    """Return the input features sorted by group. Raises InvalidCheckpoint for groups of different sizes."""
    count = len(group_of)
    valid = bool((group_of >= 0).all()) and bool((group_of < groups).all())
    if not valid or (group_of.bincount(minlength=groups) * groups != count).any():
        raise InvalidCheckpoint(f"its g_idx does not divide {count} input features into {groups} groups of one size")
    return group_of.argsort(stable=True)
