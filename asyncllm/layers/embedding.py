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


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits as they are, or in float32 and squashed to softcap * tanh(logits / softcap)."""
    return logits if softcap is None else logits.float().div_(softcap).tanh_().mul_(softcap)


class OutputEmbedding(Linear):
    """hidden [R, hidden] -> logits [R, vocab], of the hidden states' type, or float32 with a softcap."""

    def __init__(self, hidden_size: int, vocab_size: int, *, softcap: float | None = None) -> None:
        super().__init__(hidden_size, vocab_size)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        return _capped(super().forward(x), self.softcap)


class TiedOutputEmbedding(Layer):
    """An output embedding that reads the token embeddings' table."""

    product: Product = staticmethod(kernels.linear)

    def __init__(self, embedding: Embedding, *, softcap: float | None = None) -> None:
        super().__init__()
        # Held in a tuple, so that the table stays one parameter of one module.
        self._embedding = (embedding,)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        return _capped(self.product(x, self._embedding[0].weight), self.softcap)
