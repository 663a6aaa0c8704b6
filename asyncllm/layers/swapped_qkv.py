"""The projections of attention whose checkpoints turn queries and keys the other way round (nanochat)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.layers.linear import QKVLinear

__all__ = ["SwappedQKVLinear"]


class SwappedQKVLinear(QKVLinear):
    """As `QKVLinear`, of checkpoints that turn pairs the other way round.

    The features of a pair change places at load, of queries and keys alike, which changes no score.
    """

    def in_order(self, part: str | None, tensor: Tensor) -> Tensor:
        if part not in ("q", "k"):
            return tensor
        return tensor.view(-1, self.head_dim, *tensor.shape[1:]).roll(self.head_dim // 2, 1).view_as(tensor)
