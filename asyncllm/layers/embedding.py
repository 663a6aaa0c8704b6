"""Embeddings of tokens and of positions, and the output embedding that turns hidden states into logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from asyncllm.distributed.group import RankGroup, tokens_of
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["Embedding", "OutputEmbedding", "PositionEmbedding", "TiedOutputEmbedding", "whole_rows"]


class Embedding(Weighted):
    """Rows of a table, times a constant if given. ids [T] int64 -> [T, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float | None = None) -> None:
        super().__init__(hidden_size, vocab_size, shard="replicated")
        self.scale = scale

    def forward(self, ids: Tensor, step: StepInputs) -> Tensor:
        return self.method.embed(self, ids, self.scale)


class PositionEmbedding(Weighted):
    """Learned rows of a table by position (GPT-2); position p uses row p + offset. positions -> [T, hidden]."""

    def __init__(self, num_positions: int, hidden_size: int, *, offset: int = 0) -> None:
        super().__init__(hidden_size, num_positions + offset, shard="replicated")
        self.offset = offset

    def forward(self, step: StepInputs) -> Tensor:
        positions = step.positions + self.offset if self.offset else step.positions
        return self.method.embed(self, positions, None)


def _logits(
    table: Weighted,
    x: Tensor,
    scale: float | None,
    softcap: float | None,
    out: Tensor | None,
    tokens: slice | None = None,
) -> Tensor:
    """Return x table^T times scale, or, in float32, softcap * tanh(logits / softcap), in `out` if given. `tokens`:
    compute only these columns, some of which may be beyond the table."""

    def product(out: Tensor | None) -> Tensor:
        if tokens is None:
            return table.method.product(table, x, out=out)
        return table.method.product_of_rows(table, x, tokens, out=out)

    if softcap is None:
        logits = product(out)
        return logits if scale is None else logits.mul_(scale)
    capped = product(None).float().mul_((scale or 1.0) / softcap).tanh_().mul_(softcap)
    return capped if out is None else out.copy_(capped)


def whole_rows(parts: Tensor, vocab_size: int, out: Tensor | None = None) -> Tensor:
    """Return whole rows of logits [R, vocab], in `out` if given, from those of each rank's tokens [ranks, R,
    tokens]."""
    logits = parts.new_empty(parts.shape[1], vocab_size) if out is None else out
    for index, part in enumerate(parts):
        there = logits[:, index * part.shape[1] : (index + 1) * part.shape[1]]
        there.copy_(part[:, : there.shape[1]])
    return logits


class OutputEmbedding(Weighted):
    """hidden [R, hidden] -> logits [R, vocab], in the dtype of the hidden states, or float32 with a softcap.

    `scale` multiplies the logits.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, shard="column", bias=bias)
        self.scale = scale
        self.softcap = softcap
        self.vocab_size = vocab_size

    def _slice_of_part(self, part: str | None, size: int, group: RankGroup) -> slice:
        return tokens_of(group, size)

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if self.group is not None and self.method.by_row:
            missing = self.out_features * self.group.size - len(tensor)
            tensor = pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor
        super().load_part(suffix, part, index, tensor)

    def load_own(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        missing = self.out_features - len(tensor)
        super().load_own(suffix, part, index, pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)))

    def forward(self, x: Tensor) -> Tensor:
        own = self.of_rank(x)
        return own if self.group is None else whole_rows(self.group.all_gather(own), self.vocab_size)

    def of_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [R, hidden] -> logits [R, tokens] of the tokens that `tokens_of` gives to this rank; without ranks, of all.
        Entries beyond the vocabulary are meaningless. `out` receives them if given, in the dtype that they would have
        without it."""
        return _logits(self, x, self.scale, self.softcap, out)


class TiedOutputEmbedding(Layer):
    """An output embedding that reads the token embeddings' table."""

    def __init__(self, embedding: Embedding, *, scale: float | None = None, softcap: float | None = None) -> None:
        super().__init__()
        # Held in a tuple, so that the table remains a parameter of a single module.
        self._embedding = (embedding,)
        self.scale = scale
        self.softcap = softcap
        self._group: RankGroup | None = None

    def divide(self, group: RankGroup) -> None:
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """See `OutputEmbedding.forward`."""
        return _logits(self._embedding[0], x, self.scale, self.softcap, None)

    def of_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `OutputEmbedding.of_rank`."""
        table = self._embedding[0]
        tokens = None if self._group is None else tokens_of(self._group, table.out_features)
        return _logits(table, x, self.scale, self.softcap, out, tokens)
