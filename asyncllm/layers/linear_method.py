"""Linear methods: how a weight is stored, loaded and multiplied. Each layer has one.

A quantization attaches here. Its method gives a layer other tensors (`create`), says which of them a checkpoint holds
and takes them part by part (`expected_parts`, `load_part`), multiplies (`product`, `experts`), looks rows up (`embed`),
and offers products that are fused with the next op. `Weighted.attach` replaces `UNQUANTIZED` by it while the model is
on the meta device; nothing outside a method reads the tensors that it stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.errors import UnsupportedModel
from asyncllm.kernels import (
    ActivationKind,
    KVCache,
    LoRAWeights,
    Rotation,
    RoundedRows,
    Rounding,
    RowGroups,
    ShrunkRows,
)
from asyncllm.layers.layer import Layer, PartKey

__all__ = [
    "FLOATS",
    "UNQUANTIZED",
    "Activation",
    "BatchInvariant",
    "LinearMethod",
    "Shard",
    "Stored",
    "Unquantized",
    "Weighted",
    "frozen_parameter",
    "of_expert",
    "of_heads",
]


@dataclass(frozen=True)
class Stored:
    """How checkpoints store the tensors of one suffix."""

    dtypes: frozenset[str] = frozenset({"F16", "BF16", "F32", "F64"})
    """Dtypes that can be read, by the safetensors format's names."""
    axis: int | None = 0
    """Axis of the output features, along which a tensor of several parts is divided; None: the whole tensor applies to
    each part."""
    features: int = 1
    """Number of neighbouring output features that share one entry along axis 0. In a tensor of several parts, an entry
    may span two of them, so each part gets an entry per feature."""


FLOATS = Stored()

Activation = ActivationKind
"""Activation of an MLP. Gates have silu or gelu_tanh."""

_NO_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({})

Shard = Literal["column", "row", "replicated"]
"""Along which features ranks may divide a weight.

column: output features, each part separately; a rank has some of the results. row: input features; the ranks' results
are summed, and one of them adds the bias. replicated: none; every rank has the whole weight.
"""


class Weighted(Layer):
    """A layer with a weight [out, in], or one weight per expert, which its method stores.

    `rows` holds the output features of each part, in order. Parts are the units that checkpoints store and that shards,
    methods and adapters address. The layer is a `load_plan.WeightOwner`. Parameters are created on the current
    device (`meta` while a model is built) and filled by the loader.
    """

    method: LinearMethod
    weight: nn.Parameter
    bias: nn.Parameter | None
    """Parameter of the method `Unquantized`, like `weight`: only that method reads them."""
    gelu: bool = False
    """For the first products of experts: whether their gate is GELU instead of SwiGLU. Only `Unquantized` supports
    it."""
    clipped: bool = False
    """For the first products of experts: whether their SwiGLU has limits that quantized products do not compute."""

    def __init__(
        self,
        in_features: int,
        parts: int | Mapping[str, int],
        *,
        shard: Shard,
        unit: int = 1,
        bias: bool = False,
        num_experts: int | None = None,
    ) -> None:
        """`parts`: number of output features, or of each part. `unit`: number of neighbouring features that a shard
        keeps together, such as those of a head."""
        super().__init__()
        self.in_features = in_features
        self.rows: dict[str | None, slice] = {}
        self.out_features = 0
        for name, size in ({None: parts} if isinstance(parts, int) else parts).items():
            self.rows[name] = slice(self.out_features, self.out_features + size)
            self.out_features += size
        self.whole_shapes = {name: (rows.stop - rows.start, in_features) for name, rows in self.rows.items()}
        """[out, in] of each part before ranks divide it."""
        self.shard: Shard = shard
        self.unit = unit
        self.has_bias = bias
        self.num_experts = num_experts
        """Number of experts on this rank."""
        self.stored_experts = num_experts
        """Number of experts in a checkpoint."""
        self.own_experts: range | None = None
        """Which of a checkpoint's experts these are, if ranks divide experts instead of features."""
        self.group: RankGroup | None = None
        """The ranks that divide the weight."""
        self.summed_later = False
        """Whether the ranks' results of a weight divided by its input features are left unsummed: the following norm
        sums them (`layers.rank_sums`)."""
        self._share: _Share | None = None
        self.attach(UNQUANTIZED)

    def attach(self, method: LinearMethod) -> None:
        """Give the weight to `method`: its unfilled parameters replace the current ones."""
        for name, _ in list(self.named_parameters(recurse=False)):
            delattr(self, name)
        self.method = method
        method.create(self)

    @property
    def parameter_dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of the parameters that keep their own dtype regardless of the model's."""
        return self.method.dtypes

    def stored(self, suffix: str) -> Stored:
        """Return how checkpoints store the parts of this suffix."""
        return self.method.stored(suffix)

    def divide(self, group: RankGroup) -> None:
        if self.shard == "replicated" or self.own_experts is not None:
            return
        whole = self.expected_parts()
        if self.shard == "row":
            taken: dict[str | None, slice] = {None: self._slice(self.in_features, group.rank, group.size)}
            self.in_features = taken[None].stop - taken[None].start
        else:
            taken = {part: self._slice_of_part(part, rows.stop - rows.start, group) for part, rows in self.rows.items()}
            self.out_features = 0
            for part, rows in taken.items():
                start, self.out_features = self.out_features, self.out_features + rows.stop - rows.start
                self.rows[part] = slice(start, self.out_features)
        self.group, self._share = group, _Share(whole, taken)
        self.attach(self.method)

    def divide_experts(self, group: RankGroup) -> None:
        """Reduce this layer, on the meta device, to the whole experts of the group's rank. Raises like `divide`, which
        changes nothing afterwards."""
        if not self.method.by_row:
            raise UnsupportedModel(
                f"ep={group.size}: ranks cannot hold whole experts of {self.method.name} weights. Leave ep out: "
                "then each expert's features are divided."
            )
        assert self.num_experts is not None, "the layer has one weight"
        count, rest = divmod(self.num_experts, group.size)
        if rest:
            raise UnsupportedModel(
                f"ep={group.size}: {self.num_experts} experts cannot be divided evenly. Choose an ep that divides "
                f"{self.num_experts}, or leave it out, which divides each expert's features."
            )
        self.group, self._share = group, _Share(self.expected_parts(), {})
        self.own_experts = range(group.rank * count, (group.rank + 1) * count)
        self.num_experts = count
        self.attach(self.method)

    def _slice_of_part(self, part: str | None, size: int, group: RankGroup) -> slice:
        """Return the slice of a part's output features that the rank has."""
        return self._slice(size, group.rank, group.size)

    def _slice(self, size: int, rank: int, num_ranks: int) -> slice:
        units, rest = divmod(size // self.unit, num_ranks)
        if rest:
            raise UnsupportedModel(
                f"tp={num_ranks}: a weight of {size // self.unit} x {self.unit} features cannot be divided evenly. "
                f"Choose a tp that divides {size // self.unit}."
            )
        return slice(rank * units * self.unit, (rank + 1) * units * self.unit)

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return self.method.expected_parts(self) if self._share is None else self._share.whole

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if self.own_experts is not None:
            if index is None or index not in self.own_experts:
                return
            index = self.own_experts.index(index)
        if self.method.by_row:
            tensor = self.in_order(part, tensor)
            if self._share is not None and self._share.taken and self.group is not None:
                rows = self._share.taken[part if self.shard == "column" else None]
                tensor = self.method.share(self, suffix, tensor, rows, first=self.group.rank == 0)
        self.method.load_part(self, suffix, part, index, tensor)

    def own_part(self, suffix: str, part: str | None, index: int | None) -> tuple[int, slice] | None:
        """Return the axis and slice of a part's tensor that this rank has, so that only that slice is read and
        `load_own` takes it; None if `load_part` needs the whole tensor."""
        if self.own_experts is not None:
            return None if index in self.own_experts else (0, slice(0, 0))
        if self._share is None or not self.method.by_row or (self.shard == "row" and suffix != "weight"):
            return None
        return (0, self._share.taken[part]) if self.shard == "column" else (1, self._share.taken[None])

    def load_own(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        """Take the slice of a tensor that `own_part` names, as `load_part` takes the whole."""
        if self.own_experts is not None:
            return
        self.method.load_part(self, suffix, part, index, self.in_order(part, tensor))

    def own_rows(self, part: str | None) -> Tensor | slice:
        """Return the output features of a part, numbered as in a checkpoint, that the layer has, in its order: int64
        [rows], or a slice for all. Missing features of a share are the last one."""
        size = self.whole_shapes[part][0]
        rows = order = torch.arange(size)
        if self._share is not None and self.shard == "column":
            taken = self._share.taken[part]
            rows = torch.arange(taken.start, taken.stop).clamp_(max=size - 1)
        rows = self.in_order(part, order)[rows]
        return slice(None) if torch.equal(rows, order) else rows

    def own_columns(self) -> slice:
        """Return the slice of the input features of a checkpoint's weight that the layer has."""
        divided = self._share is not None and self.shard == "row"
        return self._share.taken[None] if divided and self._share is not None else slice(0, self.in_features)

    def own_bias(self, part: str | None, tensor: Tensor) -> Tensor:
        """Return the layer's share of a part's bias: zeros if another rank adds it."""
        added = self.shard == "row" and self.group is not None and self.group.rank > 0
        return torch.zeros_like(tensor) if added else tensor[self.own_rows(part)]

    def in_order(self, part: str | None, tensor: Tensor) -> Tensor:
        """Return a part's tensor of a checkpoint [out, ...] with its output features in the layer's order."""
        return tensor

    def share_of_factors(self, part: str | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's share of two matrices a [r, in] and b [out, r] whose product is added to a part of the
        weight."""
        b = self.in_order(part, b)
        if self._share is None:
            return a, b
        taken = self._share.taken[part if self.shard == "column" else None]
        return (a, b[taken]) if self.shard == "column" else (a[:, taken], b)

    def summed(self, y: Tensor) -> Tensor:
        """Return the sum over ranks of the results of a weight divided by its input features, in y's memory, unless the
        following norm computes it."""
        return y if self.group is None or self.shard != "row" or self.summed_later else self.group.all_reduce(y)

    @property
    def is_summed(self) -> bool:
        """Whether each rank has a summand of the result."""
        return self.group is not None and self.shard == "row"


class _Share(NamedTuple):
    """A rank's share of a weight."""

    whole: Mapping[PartKey, tuple[int, ...]]
    """Shapes in a checkpoint."""
    taken: Mapping[str | None, slice]
    """Output features that the rank takes, by part; or input features, under None."""


class LinearMethod(ABC):
    """A layer's operations on its weight. The tensors are parameters of the layer, so one method serves many layers."""

    name: ClassVar[str] = ""
    """Name of the quantization in config.json; empty for none."""
    by_row: ClassVar[bool] = False
    """Whether the rows of a tensor are output features, and the columns of `weight` input features. A tensor then comes
    to `load_part` in the layer's order and, if ranks divide it, reduced by `share`. Otherwise it comes whole, and the
    method selects `own_rows` and `own_columns` from it."""

    rounds: ClassVar[bool] = False
    """Whether `rounding` may return something."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Weighted.parameter_dtypes`."""
        return _NO_DTYPES

    @property
    def replaceable(self) -> bool:
        """Whether the parts of a filled layer can be replaced one by one."""
        return True

    @property
    def replaced_together(self) -> bool:
        """Whether all tensors of a part have to be replaced at once."""
        return False

    def check(self, suffix: str, tensor: Tensor) -> None:  # noqa: B027 - plain numbers are always valid
        """Raise InvalidCheckpoint for numbers that `load_part` would refuse, before any part of a filled layer is
        replaced."""

    def stored(self, suffix: str) -> Stored:
        """See `Weighted.stored`: floats with output features first, unless a method says otherwise."""
        return FLOATS

    @abstractmethod
    def create(self, layer: Weighted) -> None:
        """Create the layer's parameters. Floating-point ones take the model's dtype when they are allocated, unless
        `dtypes` names them."""

    @abstractmethod
    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        """See `load_plan.WeightOwner.expected_parts`."""

    @abstractmethod
    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        """See `load_plan.WeightOwner.load_part`."""

    def share(self, layer: Weighted, suffix: str, tensor: Tensor, taken: slice, *, first: bool) -> Tensor:
        """Return a rank's share of a checkpoint's tensor: the slice `taken` of the features by which the layer is
        divided.

        Only the `first` rank has numbers that are added once, such as a bias after the sum over ranks; the others have
        zeros. Called only for methods that are `by_row`.
        """
        raise TypeError(f"{type(self).__name__} does not divide its tensors by row")

    @abstractmethod
    def batch_invariant(self) -> LinearMethod:
        """Return the method over the same parameters whose products round every row alike in any batch."""

    @abstractmethod
    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x [..., in] -> x weight^T + bias [..., out], in `out` if given."""

    def product_and_shrunk(
        self, layer: Weighted, x: Tensor, slots: Tensor, lora: LoRAWeights, num_single: int, groups: RowGroups | None
    ) -> tuple[Tensor, ShrunkRows]:
        """Return `product` of x [T, in], and `kernels.shrink_lora` of the same rows."""
        shrunk = kernels.shrink_lora(x, slots, lora, num_single=num_single, groups=groups)
        return self.product(layer, x), shrunk

    def product_exact(self, layer: Weighted, x: Tensor) -> Tensor:
        """Return `product` with a float32 weight and bias as float32, whatever the dtype of x."""
        return self.product(layer, x.float())

    def rounding(self, layer: Weighted) -> Rounding | None:
        """Return how the layer's input is rounded before the product, so that the op that produces it may do so; None
        if the input is used unrounded. Otherwise there is a `product_rounded`."""
        return None

    def product_of_rows(self, layer: Weighted, x: Tensor, rows: slice, *, out: Tensor | None = None) -> Tensor:
        """Return columns `rows` of `product` [T, rows], in `out` if given. Columns beyond its end are meaningless."""
        return _in_columns(self.product(layer, x)[:, rows], rows.stop - rows.start, out)

    def product_rounded(self, layer: Weighted, rows: RoundedRows) -> Tensor:
        """Return `product` of rows that are already rounded as `rounding` says [T, out]."""
        raise TypeError(f"{type(self).__name__} takes rows as they are")

    @abstractmethod
    def embed(self, layer: Weighted, ids: Tensor, scale: float | None) -> Tensor:
        """ids [T] int64 -> these rows of the weight [T, in], times `scale` if given."""

    @abstractmethod
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
        """Apply `kernels.fused_experts` with the weights and biases of two layers of this method."""

    def product_by_head(
        self, layer: Weighted, x: Tensor, features: slice, *, transposed: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return each head's product with the `features` among the `unit` output features that the weight has for that
        head.

        x [T, H, in] -> [T, H, features]; transposed: x [T, H, features] -> [T, H, in]; in `out` if given. The default
        finds the weight by a product with the unit matrix; methods that can decode their storage do better.
        """
        identity = torch.eye(layer.in_features, dtype=x.dtype, device=x.device)
        weight = self.product(layer, identity).t()
        return kernels.linear_by_head(x, of_heads(weight, layer, features, transposed), out=out)

    def product_gated(self, layer: Weighted, x: Tensor, activation: Activation) -> Tensor | None:
        """Return activation(gate) * up of a product [..., gate then up] as one op; None if there is no such op."""
        return None

    def product_gated_rounded(self, layer: Weighted, rows: RoundedRows, activation: Activation) -> Tensor | None:
        """Return `product_gated` of rows that are already rounded as `rounding` says; None if it is faster to compute
        the gate separately, together with the next rounding."""
        return None

    def product_rope_fill_kv(
        self,
        layer: Weighted,
        x: Tensor,
        rotation: Rotation,
        cache: KVCache,
        plan: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Tensor | None:
        """Apply `kernels.rope_fill_kv` to the product as one op; return None and write nothing if there is no such
        op."""
        return None


class Unquantized(LinearMethod):
    """A parameter `weight` in the model's dtype, and `bias` if the layer has one, stored as in checkpoints."""

    by_row = True
    _linear = staticmethod(kernels.linear)
    _linear_by_head = staticmethod(kernels.linear_by_head)
    _fused_experts = staticmethod(kernels.fused_experts)

    def create(self, layer: Weighted) -> None:
        stack = () if layer.num_experts is None else (layer.num_experts,)
        layer.weight = frozen_parameter(*stack, layer.out_features, layer.in_features)
        layer.bias = frozen_parameter(*stack, layer.out_features) if layer.has_bias else None

    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        inner = {"weight": (layer.in_features,), **({"bias": ()} if layer.has_bias else {})}
        return {
            (name, part, expert): (rows.stop - rows.start, *shape)
            for name, shape in inner.items()
            for expert in ((None,) if layer.num_experts is None else range(layer.num_experts))
            for part, rows in layer.rows.items()
        }

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if part not in layer.rows:
            raise ValueError(f"the layer is filled by parts {list(layer.rows)}, not by {part!r}")
        parameter = layer.get_parameter(suffix)
        of_expert(parameter, index)[layer.rows[part]].copy_(tensor)

    def share(self, layer: Weighted, suffix: str, tensor: Tensor, taken: slice, *, first: bool) -> Tensor:
        if layer.shard == "column":
            return tensor[taken]
        if suffix == "weight":
            return tensor[:, taken]
        return tensor if first else torch.zeros_like(tensor)

    def batch_invariant(self) -> LinearMethod:
        return BATCH_INVARIANT

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._linear(x, layer.weight, layer.bias, out=out)

    def product_and_shrunk(
        self, layer: Weighted, x: Tensor, slots: Tensor, lora: LoRAWeights, num_single: int, groups: RowGroups | None
    ) -> tuple[Tensor, ShrunkRows]:
        return kernels.linear_shrink_lora(
            x, layer.weight, layer.bias, slots, lora, num_single=num_single, groups=groups
        )

    def product_exact(self, layer: Weighted, x: Tensor) -> Tensor:
        return kernels.linear_exact(x, layer.weight, layer.bias)

    def product_of_rows(self, layer: Weighted, x: Tensor, rows: slice, *, out: Tensor | None = None) -> Tensor:
        weight, bias = layer.weight[rows], None if layer.bias is None else layer.bias[rows]
        if rows.stop <= layer.out_features:
            return self._linear(x, weight, bias, out=out)
        product = self._linear(x, weight, bias) if len(weight) else x.new_empty(len(x), 0)
        return _in_columns(product, rows.stop - rows.start, out)

    def embed(self, layer: Weighted, ids: Tensor, scale: float | None) -> Tensor:
        return kernels.embed(ids, layer.weight, scale)

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
        return self._fused_experts(
            x,
            gate_up.weight,
            down.weight,
            weights,
            expert_ids,
            gate_up_bias=gate_up.bias,
            down_bias=down.bias,
            limit=limit,
            gelu=gate_up.gelu,
            num_chosen_from=gate_up.stored_experts or 0,
        )

    def product_by_head(
        self, layer: Weighted, x: Tensor, features: slice, *, transposed: bool = False, out: Tensor | None = None
    ) -> Tensor:
        return self._linear_by_head(x, of_heads(layer.weight, layer, features, transposed), out=out)

    def product_gated(self, layer: Weighted, x: Tensor, activation: Activation) -> Tensor | None:
        if activation != "silu" or layer.bias is not None:
            return None
        return kernels.linear_silu_mul(x, layer.weight)

    def product_rope_fill_kv(
        self,
        layer: Weighted,
        x: Tensor,
        rotation: Rotation,
        cache: KVCache,
        plan: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Tensor | None:
        if layer.bias is not None:
            return None
        return kernels.linear_rope_fill_kv(
            x,
            layer.weight,
            rotation,
            cache,
            plan,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )


class BatchInvariant(Unquantized):
    """The same parameters, with products whose order of summation depends only on the weight's shape."""

    _linear = staticmethod(kernels.linear_invariant)
    _linear_by_head = staticmethod(kernels.linear_by_head_invariant)
    _fused_experts = staticmethod(kernels.fused_experts_invariant)
    # These ops sum in a different order.
    product_and_shrunk = LinearMethod.product_and_shrunk
    product_exact = LinearMethod.product_exact
    product_gated = LinearMethod.product_gated
    product_rope_fill_kv = LinearMethod.product_rope_fill_kv


UNQUANTIZED, BATCH_INVARIANT = Unquantized(), BatchInvariant()


def frozen_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialized parameter without gradient, on the current device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def of_expert(tensor: Tensor, index: int | None) -> Tensor:
    """Return the view of a tensor [E, ...] for expert `index`; None: the tensor of a layer without experts."""
    return tensor if index is None else tensor[index]


def of_heads(weight: Tensor, layer: Weighted, features: slice, transposed: bool) -> Tensor:
    """Return a weight [out, in] in the form that `kernels.linear_by_head` takes."""
    heads = weight.view(-1, layer.unit, weight.shape[-1])[:, features]
    return heads.transpose(1, 2) if transposed else heads


def _in_columns(part: Tensor, width: int, out: Tensor | None) -> Tensor:
    """Return part [T, n] as the first of `width` columns, in `out` if given."""
    if out is None:
        return pad(part, (0, width - part.shape[1]))
    out[:, : part.shape[1]] = part
    return out
