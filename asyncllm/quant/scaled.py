"""The method of 8-bit weights, with activations that are rounded to 8 bits at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.kernels import RoundedRows, Rounding, ScaledWeight
from asyncllm.kernels.scaled import GROUP, expand, round_codes
from asyncllm.layers.layer import PartKey
from asyncllm.layers.linear_method import (
    FLOATS,
    Activation,
    LinearMethod,
    Stored,
    Weighted,
    frozen_parameter,
    of_expert,
    of_heads,
)
from asyncllm.quant.settings import Header

__all__ = ["ScaleLayout", "Scaled", "holds_codes", "scaled"]

ScaleLayout = Literal["tensor", "channel", "block"]

_INPUT_SCALES = ("input_scale", "activation_scale")

_TYPES = {torch.int8: Stored(frozenset({"I8"})), torch.float8_e4m3fn: Stored(frozenset({"F8_E4M3"}))}


class _State(Protocol):
    """The method's state in a layer."""

    codes: Tensor
    scales: Tensor
    input_scale: Tensor | None
    input_scales: dict[str | None, float]
    """Scales of the activations of each part. The layer uses the largest."""
    offset: Tensor | None


def _state(layer: Weighted) -> _State:
    return cast(_State, layer)


@dataclass(frozen=True)
class Scaled(LinearMethod):
    """`weight` of `dtype`, with scales under the suffix `scale`. Without a suffix the file has an unquantized weight,
    which is rounded while it is loaded, with a scale for each output feature. Methods are compared by value."""

    dtype: torch.dtype
    scale: str | None
    layout: ScaleLayout
    scale_shape: tuple[int, ...] = ()
    """Shape of the scale of a whole tensor: [] or [1]."""
    input_shape: tuple[int, ...] = (1,)
    """Shape of the activations' scale."""
    columns: bool = True
    """Whether scales per channel are [N, 1] rather than [N]."""
    input_suffix: str | None = None
    """Suffix of the activations' scale, or None if it is computed from them."""
    invariant: bool = False

    name: ClassVar[str] = "fp8"
    rounds: ClassVar[bool] = True

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"codes": self.dtype, "scales": torch.float32, "input_scale": torch.float32}

    @property
    def replaced_together(self) -> bool:
        return self.scale is not None

    def check(self, suffix: str, tensor: Tensor) -> None:
        if suffix == self.input_suffix:
            _input_scale(tensor)
        elif suffix == self.scale:
            _checked(tensor)

    def stored(self, suffix: str) -> Stored:
        if suffix == "weight" and self.scale is not None:
            return _TYPES[self.dtype]
        if suffix == self.scale and self.layout == "block":
            return Stored(features=GROUP)
        whole = suffix == self.input_suffix or (suffix == self.scale and self.layout == "tensor")
        return Stored(axis=None) if whole else FLOATS

    def create(self, layer: Weighted) -> None:
        if layer.num_experts is not None and layer.has_bias:
            raise UnsupportedModel("Experts of 8 bits with biases are not implemented. Use the checkpoint in bfloat16.")
        stack = () if layer.num_experts is None else (layer.num_experts,)
        n, k = layer.out_features, layer.in_features
        whole = next(columns for _, columns in layer.whole_shapes.values())
        if self.layout == "block" and k < whole and k % GROUP:
            raise UnsupportedModel(
                f"tp: of {whole} input features in blocks of {GROUP} a rank would have {k}. Use a tp that leaves each "
                f"a multiple of {GROUP}."
            )
        own = _state(layer)
        own.codes = frozen_parameter(*stack, n, k, dtype=self.dtype)
        own.scales = frozen_parameter(*stack, -(-k // GROUP) if self.layout == "block" else 1, n, dtype=torch.float32)
        # The scales of each expert's activations are computed from the activations.
        static = self.input_suffix is not None and layer.num_experts is None
        own.input_scale = frozen_parameter(1, dtype=torch.float32) if static else None
        own.input_scales = {}
        own.offset = frozen_parameter(*stack, n) if layer.has_bias else None

    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        parts: dict[PartKey, tuple[int, ...]] = {}
        for part, rows in layer.rows.items():
            size = rows.stop - rows.start
            shapes: dict[str, tuple[int, ...]] = {"weight": (size, layer.in_features)}
            if self.scale is not None:
                shapes[self.scale] = self._shape(size, layer.in_features)
            if self.input_suffix is not None:
                shapes[self.input_suffix] = self.input_shape
            if layer.has_bias:
                shapes["bias"] = (size,)
            for index in (None,) if layer.num_experts is None else range(layer.num_experts):
                parts |= {(suffix, part, index): shape for suffix, shape in shapes.items()}
        return parts

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        own, rows = _state(layer), layer.rows[part]
        taken, columns = layer.own_rows(part), layer.own_columns()
        if suffix == "bias":
            assert own.offset is not None
            of_expert(own.offset, index)[rows] = layer.own_bias(part, tensor)
        elif suffix == "weight" and self.scale is None:
            # The scale belongs to a whole row, of which a rank may have a part.
            codes, scales = round_codes(tensor[taken].to(own.codes.device).float(), self.dtype)
            of_expert(own.codes, index)[rows] = codes[:, columns]
            of_expert(own.scales, index)[:, rows] = scales.t()
        elif suffix == "weight":
            of_expert(own.codes, index)[rows] = tensor[taken, columns]
        elif suffix == self.input_suffix:
            own.input_scales[part] = _input_scale(tensor)
            if own.input_scale is not None:
                own.input_scale.fill_(max(own.input_scales.values()))
        else:
            scales = _checked(tensor)
            if self.layout == "block":
                groups, size = slice(columns.start // GROUP, -(-columns.stop // GROUP)), layer.whole_shapes[part][0]
                by_row = scales if len(scales) == size else scales.repeat_interleave(GROUP, 0)[:size]
                scales = by_row[taken, groups].t()
            elif self.layout == "channel":
                scales = scales.reshape(-1)[taken][None]
            of_expert(own.scales, index)[:, rows] = scales

    def batch_invariant(self) -> LinearMethod:
        return replace(self, invariant=True)

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        bias = _state(layer).offset
        if self.invariant:
            return kernels.linear_invariant(x, expand(_weight(layer), x.dtype), bias, out=out)
        return kernels.linear_scaled(x, _weight(layer), bias, out=out)

    def rounding(self, layer: Weighted) -> Rounding | None:
        return None if self.invariant else _weight(layer).rounding

    def product_rounded(self, layer: Weighted, rows: RoundedRows) -> Tensor:
        return kernels.linear_rounded(rows.codes, rows.scales, _weight(layer), _state(layer).offset, dtype=rows.dtype)

    def product_gated_rounded(self, layer: Weighted, rows: RoundedRows, activation: Activation) -> Tensor | None:
        weight = _weight(layer)
        if activation != "silu" or layer.has_bias or weight.rounding.grouped:
            return None
        return kernels.linear_rounded_silu_mul(rows.codes, rows.scales, weight, dtype=rows.dtype)

    def embed(self, layer: Weighted, ids: Tensor, scale: float | None) -> Tensor:
        raise UnsupportedModel("A token embedding of 8 bits is not implemented. Use a checkpoint that keeps it.")

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
            raise UnsupportedModel("Experts of 8 bits support only SwiGLU. Use the checkpoint in bfloat16.")
        if self.invariant:
            first, second = (expand(_weight(each), x.dtype) for each in (gate_up, down))
            return kernels.fused_experts_invariant(x, first, second, weights, expert_ids)
        return kernels.scaled_experts(x, _weight(gate_up), _weight(down), weights, expert_ids)

    def product_by_head(
        self, layer: Weighted, x: Tensor, features: slice, *, transposed: bool = False, out: Tensor | None = None
    ) -> Tensor:
        heads = of_heads(expand(_weight(layer), x.dtype), layer, features, transposed)
        product = kernels.linear_by_head_invariant if self.invariant else kernels.linear_by_head
        return product(x, heads, out=out)

    def _shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of a part's scales."""
        if self.layout == "tensor":
            return self.scale_shape
        if self.layout == "channel":
            return (rows, 1) if self.columns else (rows,)
        return (-(-rows // GROUP), -(-columns // GROUP))


def holds_codes(tensors: Mapping[str, Header]) -> bool:
    """Return whether a module has an 8-bit weight, with or without scales."""
    return "weight" in tensors and any(tensors["weight"].dtype in each.dtypes for each in _TYPES.values())


def scaled(dtype: torch.dtype, scale: str, tensors: Mapping[str, Header], *, block: bool, static: bool) -> Scaled:
    """Return the method of a module with these tensors, whose scales are named `scale`: per block, or as their shape
    shows. `static`: there is a scale for activations, under its name in the files of llm-compressor or transformers."""
    shape = tensors[scale].shape if scale in tensors else (1,)
    layout: ScaleLayout = "block" if block else "tensor" if shape in ((), (1,)) else "channel"
    input_suffix = next((name for name in _INPUT_SCALES if name in tensors), _INPUT_SCALES[0]) if static else None
    input_shape = () if input_suffix is None or input_suffix not in tensors else tensors[input_suffix].shape
    return Scaled(
        dtype,
        scale,
        layout,
        scale_shape=shape if layout == "tensor" else (1,),
        input_shape=input_shape if input_shape == () else (1,),
        # One tensor may hold all experts.
        columns=len(shape) == (len(tensors["weight"].shape) if "weight" in tensors else 2),
        input_suffix=input_suffix,
    )


def _weight(layer: Weighted) -> ScaledWeight:
    own = _state(layer)
    return ScaledWeight(own.codes, own.scales, own.input_scale)


def _input_scale(tensor: Tensor) -> float:
    scale = float(_checked(tensor))
    if not scale:
        raise InvalidCheckpoint("a scale of 0 for activations, which cannot be divided by it")
    return scale


def _checked(scales: Tensor) -> Tensor:
    if not scales.float().isfinite().all() or (scales.float() < 0).any():
        raise InvalidCheckpoint("the scales of this weight are not all finite and at least 0; download it again")
    return scales.float()
