"""Linear methods: how a weight is stored, loaded and multiplied by. A layer is composed of one.

A quantization attaches here. Its method gives a layer other tensors (`create`), says what a checkpoint holds of them
and takes it part by part (`expected_parts`, `load_part`), multiplies (`product`, `experts`), looks rows up (`embed`),
and offers those of its products that are one op with what follows. `Weighted.attach` puts it in the place of
`UNQUANTIZED` while the model is on the meta device; nothing outside a method reads the tensors that it stores.
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
from asyncllm.kernels import ActivationKind, KVCache, Rotation, RoundedRows, Rounding
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
    "of_heads",
]


@dataclass(frozen=True)
class Stored:
    """How checkpoints store the tensors of one suffix."""

    dtypes: frozenset[str] = frozenset({"F16", "BF16", "F32", "F64"})
    """The types that are read, by the safetensors format's names."""
    axis: int | None = 0
    """That of the output features, along which a tensor of several parts is divided; None: the whole of it holds for
    each part."""
    features: int = 1
    """Neighbouring output features that have one entry along axis 0: of a tensor of several parts, they may be of two
    of them, so that each part is given an entry for each of its features."""


FLOATS = Stored()

Activation = ActivationKind
"""Of MLPs. Gates have silu or gelu_tanh."""

_NO_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({})

Shard = Literal["column", "row", "replicated"]
"""Along which features ranks may divide a weight.

column: output features, each part by itself; a rank has some of the results. row: input features; the ranks' results
are to be added up, and one of them adds the bias. replicated: none, every rank has all of it.
"""


class Weighted(Layer):
    """A layer with a weight [out, in], or with one for each of several experts, which its method stores.

    `rows` are the output features of each part, in order: the parts are what checkpoints store and what shards,
    methods and adapters address. It is a WeightOwner of `models.weights`. Parameters are born on whatever device is
    current (`meta` while a model is built) and filled by the loader.
    """

    method: LinearMethod
    weight: nn.Parameter
    bias: nn.Parameter | None
    """Of the method `Unquantized`, as is `weight`: no one else reads them."""
    gelu: bool = False
    """Of the first products of experts: whether their gate is GELU's, not SwiGLU's. Only `Unquantized` has such."""

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
        """`parts`: output features, or those of each part. `unit`: how many neighbours of the features that a shard
        divides stay together, as those of a head do."""
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
        """Those that this rank has."""
        self.stored_experts = num_experts
        """Those of a checkpoint."""
        self.own_experts: range | None = None
        """Which of a checkpoint's they are, where ranks divide experts instead of features."""
        self.group: RankGroup | None = None
        """The ranks among which the weight is divided."""
        self.summed_later = False
        """Whether the ranks' results of a weight divided by its input features stay what they are: the norm that
        follows adds them up (`layers.rank_sums`)."""
        self._share: _Share | None = None
        self.attach(UNQUANTIZED)

    def attach(self, method: LinearMethod) -> None:
        """Leave the weight to `method`: its parameters, unfilled, take the place of those that are there."""
        for name, _ in list(self.named_parameters(recurse=False)):
            delattr(self, name)
        self.method = method
        method.create(self)

    @property
    def parameter_dtypes(self) -> Mapping[str, torch.dtype]:
        """Types of the parameters that keep their own, whatever the model's is."""
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
        """Leave this layer, on the meta device, the experts of the group's rank, whole. Raises as `divide`, which
        changes nothing afterwards."""
        if not self.method.by_row:
            raise UnsupportedModel(
                f"ep={group.size}: whole experts of {self.method.name} weights are not given to ranks. Leave ep out: "
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
        """Return which of a part's output features the rank has."""
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
        """Return which features of a part's tensor this rank has, and along which axis, so that no more of it need be
        read and `load_own` takes it; None where `load_part` has to have all of it."""
        if self.own_experts is not None:
            return None if index in self.own_experts else (0, slice(0, 0))
        if self._share is None or not self.method.by_row or (self.shard == "row" and suffix != "weight"):
            return None
        return (0, self._share.taken[part]) if self.shard == "column" else (1, self._share.taken[None])

    def load_own(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        """Take what `own_part` names of a tensor, as `load_part` takes the whole."""
        if self.own_experts is not None:
            return
        self.method.load_part(self, suffix, part, index, self.in_order(part, tensor))

    def own_rows(self, part: str | None) -> Tensor | slice:
        """Return which output features of a part, as a checkpoint has them, the layer has, in its order; int64 [rows]
        unless they are all. Those of a share that there are not are the last one."""
        size = self.whole_shapes[part][0]
        rows = order = torch.arange(size)
        if self._share is not None and self.shard == "column":
            taken = self._share.taken[part]
            rows = torch.arange(taken.start, taken.stop).clamp_(max=size - 1)
        rows = self.in_order(part, order)[rows]
        return slice(None) if torch.equal(rows, order) else rows

    def own_columns(self) -> slice:
        """Return which input features of a checkpoint's weight the layer has."""
        divided = self._share is not None and self.shard == "row"
        return self._share.taken[None] if divided and self._share is not None else slice(0, self.in_features)

    def own_bias(self, part: str | None, tensor: Tensor) -> Tensor:
        """Return what the layer has of a part's bias: zeros where another rank adds it."""
        added = self.shard == "row" and self.group is not None and self.group.rank > 0
        return torch.zeros_like(tensor) if added else tensor[self.own_rows(part)]

    def in_order(self, part: str | None, tensor: Tensor) -> Tensor:
        """Return a part's tensor of a checkpoint [out, ...] with its output features in the layer's order."""
        return tensor

    def share_of_factors(self, part: str | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank has of two matrices a [r, in] and b [out, r] whose product is added to a part of the
        weight."""
        b = self.in_order(part, b)
        if self._share is None:
            return a, b
        taken = self._share.taken[part if self.shard == "column" else None]
        return (a, b[taken]) if self.shard == "column" else (a[:, taken], b)

    def summed(self, y: Tensor) -> Tensor:
        """Return the ranks' results of a weight divided by its input features added up, in y's memory, unless that is
        for the norm that follows."""
        return y if self.group is None or self.shard != "row" or self.summed_later else self.group.add_up(y)

    @property
    def is_summed(self) -> bool:
        """Whether the ranks' results are shares of a sum."""
        return self.group is not None and self.shard == "row"


class _Share(NamedTuple):
    """What a rank has of a weight."""

    whole: Mapping[PartKey, tuple[int, ...]]
    """The shapes that a checkpoint has."""
    taken: Mapping[str | None, slice]
    """By part the output features that the rank takes, or under None the input features."""


class LinearMethod(ABC):
    """What a layer does with its weight. The tensors are parameters of the layer, so one method serves many layers."""

    name: ClassVar[str] = ""
    """Of the quantization, as config.json calls it; empty for none."""
    by_row: ClassVar[bool] = False
    """Whether a tensor's rows are output features, and those of `weight` have input features for columns. Then it comes
    to `load_part` in the layer's order, and where ranks divide it, as this one's `share`. Else it comes whole, and the
    method takes `own_rows` and `own_columns` of what it says."""

    rounds: ClassVar[bool] = False
    """Whether `rounding` may return anything."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As `Weighted.parameter_dtypes`."""
        return _NO_DTYPES

    @property
    def replaceable(self) -> bool:
        """Whether the parts of a filled layer may be given anew, one by one."""
        return True

    @property
    def together(self) -> bool:
        """Whether they may, but each part's tensors only all at once."""
        return False

    def check(self, suffix: str, tensor: Tensor) -> None:  # noqa: B027 - plain numbers are all right
        """Raise InvalidCheckpoint for numbers that `load_part` would refuse, before a filled layer is given any."""

    def stored(self, suffix: str) -> Stored:
        """As `Weighted.stored`: floats, the output features first, unless a method says otherwise."""
        return FLOATS

    @abstractmethod
    def create(self, layer: Weighted) -> None:
        """Give the layer its parameters. Those of floating point take the model's type when it is allocated, unless
        `dtypes` names them."""

    @abstractmethod
    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        """As `models.weights.WeightOwner.expected_parts`."""

    @abstractmethod
    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        """As `models.weights.WeightOwner.load_part`."""

    def share(self, layer: Weighted, suffix: str, tensor: Tensor, taken: slice, *, first: bool) -> Tensor:
        """Return a rank's share of a checkpoint's tensor: `taken` of the features by which the layer is divided.

        What is added once, such as a bias behind the ranks' sum, only the `first` rank has; the others have zeros.
        Only a method that is `by_row` is asked.
        """
        raise TypeError(f"{type(self).__name__} does not divide its tensors by row")

    @abstractmethod
    def batch_invariant(self) -> LinearMethod:
        """Return the method over the same parameters whose products round every row alike, whatever the batch."""

    @abstractmethod
    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x [..., in] -> x weight^T + bias [..., out], in `out` if given."""

    def product_exact(self, layer: Weighted, x: Tensor) -> Tensor:
        """Return `product` with a weight and bias of float32 as float32, whatever the type of x."""
        return self.product(layer, x.float())

    def rounding(self, layer: Weighted) -> Rounding | None:
        """Return how the layer's input is rounded before the product, so that the op that makes it may do so; None
        where the input is taken as it is. With one there is `product_rounded`."""
        return None

    def product_of_rows(self, layer: Weighted, x: Tensor, rows: slice, *, out: Tensor | None = None) -> Tensor:
        """Return columns `rows` of `product` [T, rows], of which those beyond its end mean nothing; in `out` if
        given."""
        return _in_columns(self.product(layer, x)[:, rows], rows.stop - rows.start, out)

    def product_rounded(self, layer: Weighted, rows: RoundedRows) -> Tensor:
        """Return `product` of rows that are rounded already, as `rounding` says [T, out]."""
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
        """As `kernels.fused_experts`, with the weights and biases of two layers of this method."""

    def product_by_head(
        self, layer: Weighted, x: Tensor, features: slice, *, transposed: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return each head's own product with these of the `unit` output features that the weight has for it.

        x [T, H, in] -> [T, H, features]; transposed: x [T, H, features] -> [T, H, in]; in `out` if given. The weight
        is found by a product with the unit matrix here, which a method does better that can undo its storage itself.
        """
        identity = torch.eye(layer.in_features, dtype=x.dtype, device=x.device)
        weight = self.product(layer, identity).t()
        return kernels.linear_by_head(x, of_heads(weight, layer, features, transposed), out=out)

    def product_gated(self, layer: Weighted, x: Tensor, activation: Activation) -> Tensor | None:
        """Return activation(gate) * up of a product [..., gate then up] as one op; None where there is no such op."""
        return None

    def product_gated_rounded(self, layer: Weighted, rows: RoundedRows, activation: Activation) -> Tensor | None:
        """Return `product_gated` of rows that are rounded already, as `rounding` says; None where the gate is better
        taken with the rounding behind it."""
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
        """As `kernels.rope_fill_kv` of the product, as one op; None, with nothing written, where there is no such."""
        return None


class Unquantized(LinearMethod):
    """A parameter `weight` of the model's type, and `bias` if the layer has one, as checkpoints store them."""

    by_row = True
    _linear = staticmethod(kernels.linear)
    _linear_by_head = staticmethod(kernels.linear_by_head)
    _fused_experts = staticmethod(kernels.fused_experts)

    def create(self, layer: Weighted) -> None:
        stack = () if layer.num_experts is None else (layer.num_experts,)
        layer.weight = _parameter(*stack, layer.out_features, layer.in_features)
        layer.bias = _parameter(*stack, layer.out_features) if layer.has_bias else None

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
        (parameter if index is None else parameter[index])[layer.rows[part]].copy_(tensor)

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
    """The same parameters, with products whose sums are taken in an order that the weight's shape alone decides."""

    _linear = staticmethod(kernels.linear_invariant)
    _linear_by_head = staticmethod(kernels.linear_by_head_invariant)
    _fused_experts = staticmethod(kernels.fused_experts_invariant)
    # These ops take their sums in another order.
    product_exact = LinearMethod.product_exact
    product_gated = LinearMethod.product_gated
    product_rope_fill_kv = LinearMethod.product_rope_fill_kv


UNQUANTIZED, BATCH_INVARIANT = Unquantized(), BatchInvariant()


def of_heads(weight: Tensor, layer: Weighted, features: slice, transposed: bool) -> Tensor:
    """Return a weight [out, in] as `kernels.linear_by_head` takes it."""
    heads = weight.view(-1, layer.unit, weight.shape[-1])[:, features]
    return heads.transpose(1, 2) if transposed else heads


def _in_columns(part: Tensor, width: int, out: Tensor | None) -> Tensor:
    """Return part [T, n] as the first columns of `width` ones, in `out` if given."""
    if out is None:
        return pad(part, (0, width - part.shape[1]))
    out[:, : part.shape[1]] = part
    return out


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
