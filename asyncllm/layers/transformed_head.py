"""The output embedding behind a dense layer of its own, as in encoders' heads for masked tokens (ModernBERT)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup, tokens_of
from asyncllm.layers.embedding import OutputEmbedding, TiedOutputEmbedding
from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.linear_method import Weighted

__all__ = ["LogitBias", "TransformedOutputEmbedding"]


class LogitBias(ParameterOwner):
    """One summand for each token's logit."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab_size), requires_grad=False)


class TransformedOutputEmbedding(Layer):
    """hidden [R, hidden] -> logits [R, vocab]: norm(gelu(dense(hidden))) times the table, plus a bias."""

    def __init__(
        self,
        table: OutputEmbedding | TiedOutputEmbedding,
        vocab_size: int,
        *,
        dense_bias: bool,
        norm: LayerNorm,
        bias: bool,
    ) -> None:
        super().__init__()
        hidden_size = norm.weight.shape[0]
        self.dense = Weighted(hidden_size, hidden_size, shard="replicated", bias=dense_bias)
        self.norm = norm
        self.table = table
        self.logit_bias = LogitBias(vocab_size) if bias else None
        self._group: RankGroup | None = None

    def divide(self, group: RankGroup) -> None:
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """See `OutputEmbedding.forward`."""
        logits: Tensor = self.table(self._transformed(x))
        return logits if self.logit_bias is None else logits.add_(self.logit_bias.bias)

    def of_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `OutputEmbedding.of_rank`."""
        logits = self.table.of_rank(self._transformed(x), out)
        if self.logit_bias is not None:
            bias = self.logit_bias.bias
            own = bias if self._group is None else bias[tokens_of(self._group, len(bias))]
            logits[:, : len(own)] += own
        return logits

    def _transformed(self, x: Tensor) -> Tensor:
        dense = kernels.activate(self.dense.method.product(self.dense, x), "gelu")
        normed: Tensor = self.norm(dense)
        return normed
