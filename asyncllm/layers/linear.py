"""Linear layers, fused where several projections read the same input.

The parts of a fused layer ("q", "gate") are what checkpoints store and what sharding, quantization methods and adapters
address. Every layer here is a WeightOwner of `models.weights`: it states the parts it expects and takes them one by
one. Parameters are born on whatever device is current (`meta` while a model is built) and filled by the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.layer import Layer

__all__ = ["Linear", "MergedLinear", "Product", "QKVLinear"]

Product = Callable[..., Tensor]
"""`kernels.linear`, or another op of its signature."""


class Linear(Layer):
    """y = x W^T + b; x [..., in_features] -> [..., out_features]."""

    bias: nn.Parameter | None
    product: Product = staticmethod(kernels.linear)
    """How the product is computed; a model that must not depend on the batch has `kernels.linear_invariant` here."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {(name, None, None): tuple(parameter.shape) for name, parameter in self.named_parameters(recurse=False)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.get_parameter(suffix).copy_(tensor)


class MergedLinear(Linear):
    """Several linear layers over the same input as one matmul; their outputs follow one another in the last axis."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {
            (name, part, None): (rows.stop - rows.start, *parameter.shape[1:])
            for name, parameter in self.named_parameters(recurse=False)
            for part, rows in self.rows.items()
        }

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if part is None:
            raise ValueError(f"a merged layer is filled by parts {list(self.rows)}")
        self.get_parameter(suffix)[self.rows[part]].copy_(tensor)


class QKVLinear(MergedLinear):
    """The projections q, k and v of attention."""

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool = False
    ) -> None:
        parts = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        super().__init__(in_features, parts, bias=bias)
        self.head_dim = head_dim
