"""Token embeddings, and the output embedding that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear, Product

__all__ = ["Embedding", "OutputEmbedding", "TiedOutputEmbedding"]


class Embedding(Layer):
    """Rows of a table, times a constant if given. ids [T] int64 -> [T, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return kernels.embed(ids, self.weight, self.scale)

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {("weight", None, None): tuple(self.weight.shape)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.weight.copy_(tensor)


def _logits(product: Product, x: Tensor, weight: Tensor, softcap: float | None, out: Tensor | None) -> Tensor:
    """x weight^T as it is, or in float32 and squashed to softcap * tanh(logits / softcap); in `out` if given."""
    if softcap is None:
        return product(x, weight, out=out)
    capped = product(x, weight).float().div_(softcap).tanh_().mul_(softcap)
    return capped if out is None else out.copy_(capped)


class OutputEmbedding(Linear):
    """hidden [R, hidden] -> logits [R, vocab], of the hidden states' type, or float32 with a softcap.

    They are in `out` if that is given, [R, vocab] of the type they would have without it.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, softcap: float | None = None) -> None:
        super().__init__(hidden_size, vocab_size)
        self.softcap = softcap

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _logits(self.product, x, self.weight, self.softcap, out)


class TiedOutputEmbedding(Layer):
    """An output embedding that reads the token embeddings' table."""

    product: Product = staticmethod(kernels.linear)

    def __init__(self, embedding: Embedding, *, softcap: float | None = None) -> None:
        super().__init__()
        # Held in a tuple, so that the table stays one parameter of one module.
        self._embedding = (embedding,)
        self.softcap = softcap

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """As `OutputEmbedding.forward`."""
        return _logits(self.product, x, self._embedding[0].weight, self.softcap, out)
