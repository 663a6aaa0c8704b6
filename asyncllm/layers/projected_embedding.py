"""Embeddings from a table narrower than the model, which is also the output embedding (OPT-350M)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.layers.embedding import Embedding, TiedOutputEmbedding
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["ProjectedEmbedding", "ProjectedOutputEmbedding"]


class ProjectedEmbedding(Layer):
    """Rows of a narrow table, projected to the model's width. ids [T] int64 -> [T, hidden]."""

    def __init__(self, vocab_size: int, table_size: int, hidden_size: int) -> None:
        super().__init__()
        self.table = Embedding(vocab_size, table_size)
        self.project = Linear(table_size, hidden_size, shard="replicated")

    def forward(self, ids: Tensor, step: StepInputs) -> Tensor:
        wide: Tensor = self.project(self.table(ids, step), step)
        return wide


class ProjectedOutputEmbedding(Layer):
    """hidden [R, hidden] -> logits [R, vocab]: projected to the table's width, then multiplied by the table."""

    def __init__(self, embedding: ProjectedEmbedding, hidden_size: int) -> None:
        super().__init__()
        self.project = Linear(hidden_size, embedding.table.in_features, shard="replicated")
        self.tied = TiedOutputEmbedding(embedding.table)

    def forward(self, x: Tensor) -> Tensor:
        """See `OutputEmbedding.forward`."""
        return self.tied.forward(self._narrow(x))

    def of_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `OutputEmbedding.of_rank`."""
        return self.tied.of_rank(self._narrow(x), out)

    def _narrow(self, x: Tensor) -> Tensor:
        return self.project.method.product(self.project, x)
