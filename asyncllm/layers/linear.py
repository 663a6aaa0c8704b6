"""Linear layers: shard x method x adapters.

The method stores the weight and multiplies (`layers.linear_method`, where a quantization attaches).

A shard is the part that `divide` leaves to a rank, on the meta device, according to `shard`, `unit` and the parts in
`rows`. If it is part of the input features, the ranks' results are summed.

Adapters are selected by row, as the step says. In steps with adapters, no op fuses the product with what follows;
their additions to gate and up are fused with the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import KVCache, Rotation, RoundedRows, Rounding, ShrunkRows
from asyncllm.layers.images import ImageRows
from asyncllm.layers.linear_method import Activation, Shard, Weighted
from asyncllm.layers.step_inputs import Column, StepInputs

__all__ = ["Linear", "MergedLinear", "QKVLinear", "RowAdapters"]


class RowAdapters(Protocol):
    """Additions to the product of one layer, row by row, each from the row's adapter."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The step columns that they read."""

    def product(self, layer: Weighted, x: Tensor, step: StepInputs) -> tuple[Tensor, ShrunkRows]:
        """Return the layer's own product [T, out] of x [T, in], and the rows of x times their adapters' A."""

    def expand(self, y: Tensor, shrunk: ShrunkRows, step: StepInputs) -> Tensor:
        """Return the products y [T, out] with the rows' additions, in y's memory or new."""

    def expand_gated(self, y: Tensor, shrunk: ShrunkRows, activation: Activation, step: StepInputs) -> Tensor:
        """Return activation(gate) * up [T, out / 2] of the products y [T, out] with the rows' additions, gate first.
        What y holds afterwards is unspecified."""


class Linear(Weighted):
    """y = x W^T + b; x [..., in_features] -> [..., out_features]."""

    adapters: RowAdapters | None = None
    has_several_uses: bool = False
    """Whether several layers of the model multiply by this weight. An adapter is of one of them."""

    def __init__(self, in_features: int, out_features: int, *, shard: Shard, unit: int = 1, bias: bool = False) -> None:
        super().__init__(in_features, out_features, shard=shard, unit=unit, bias=bias)

    @property
    def image_rows(self) -> ImageRows | None:
        """The layer's image-specific weights, a submodule of this name."""
        rows = self._modules.get("image_rows")
        return rows if isinstance(rows, ImageRows) else None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The step columns that the layer reads; see `DecoderLM.step_columns`."""
        return () if self.adapters is None else self.adapters.columns

    def adds(self, step: StepInputs) -> bool:
        """Return whether adapters or images may change the step's products, so that they cannot be fused with what
        follows."""
        return (self.adapters is not None and step.adapted) or (
            step.image_features is not None and self.image_rows is not None
        )

    def rounding(self, step: StepInputs) -> Rounding | None:
        """Return how the op that produces the input may round it; None if the layer needs it unrounded."""
        rounding = self.method.rounding(self)
        return None if rounding is None or self.adds(step) else rounding

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        if isinstance(x, RoundedRows):
            return self.summed(self.method.product_rounded(self, x))
        adapters = self.adapters if step.adapted else None
        shrunk = None
        if adapters is None:
            y = self.method.product(self, x)
        else:
            y, shrunk = adapters.product(self, x, step)
        rows = None if step.image_features is None else self.image_rows
        if rows is not None:
            y = rows.apply_to(y, x, step)
        if adapters is not None and shrunk is not None:
            # Before the sum over ranks: additions from the ranks' shares of the input features are part of it.
            y = adapters.expand(y, shrunk, step)
        return y if self.group is None else self.summed(y)


class MergedLinear(Linear):
    """Several linear layers over the same input as one product; their outputs are concatenated along the last axis."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, unit: int = 1, bias: bool = False) -> None:
        Weighted.__init__(self, in_features, parts, shard="column", unit=unit, bias=bias)

    def gated(self, x: Tensor | RoundedRows, activation: Activation, step: StepInputs) -> Tensor | None:
        """Return activation(gate) * up of the parts gate and up, if that is one op; otherwise None."""
        if isinstance(x, RoundedRows):
            return self.method.product_gated_rounded(self, x, activation)
        if not self.adds(step):
            return self.method.product_gated(self, x, activation)
        if self.adapters is None or not step.adapted or self.image_rows is not None:
            return None
        y, shrunk = self.adapters.product(self, x, step)
        return self.adapters.expand_gated(y, shrunk, activation, step)


class QKVLinear(MergedLinear):
    """The projections q, k and v of attention.

    `paired`: number of features per head that checkpoints store as neighbouring pairs, where the rotation pairs i with
    i + paired / 2 (GPT-J, GLM). They are reordered at load, in queries and keys alike, which changes no score.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        paired: int = 0,
    ) -> None:
        parts = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        super().__init__(in_features, parts, unit=head_dim, bias=bias)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.stored_kv_heads = num_kv_heads
        """Number of KV heads in a checkpoint, of which a rank may have a share."""
        self.head_dim = head_dim
        self.paired = paired

    def in_order(self, part: str | None, tensor: Tensor) -> Tensor:
        return self._halved(tensor) if self.paired and part in ("q", "k") else tensor

    def _halved(self, tensor: Tensor) -> Tensor:
        """Return rows by head, with the first features of all pairs before the second ones."""
        heads = tensor.view(-1, self.head_dim, *tensor.shape[1:])
        end = self.paired
        return torch.cat([heads[:, :end:2], heads[:, 1:end:2], heads[:, end:]], 1).view_as(tensor)

    def divide(self, group: RankGroup) -> None:
        super().divide(group)
        self.num_heads = (self.rows["q"].stop - self.rows["q"].start) // self.head_dim
        self.num_kv_heads = (self.rows["k"].stop - self.rows["k"].start) // self.head_dim

    def _slice_of_part(self, part: str | None, size: int, group: RankGroup) -> slice:
        # With fewer key heads than ranks, several ranks share one.
        copies = group.size // self.num_kv_heads if part != "q" and group.size % self.num_kv_heads == 0 else 1
        return self._slice(size, group.rank // max(1, copies), group.size // max(1, copies))

    def rope_fill_kv(self, x: Tensor | RoundedRows, rotation: Rotation, cache: KVCache, plan: Tensor) -> Tensor | None:
        """Apply `kernels.rope_fill_kv` to the product, if that is one op; otherwise return None and write nothing."""
        if isinstance(x, RoundedRows):
            return None
        return self.method.product_rope_fill_kv(
            self,
            x,
            rotation,
            cache,
            plan,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
