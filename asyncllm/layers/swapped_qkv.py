"""Projections of attention for checkpoints that rotate queries and keys in the opposite direction (nanochat)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.layers.linear import QKVLinear

__all__ = ["SwappedQKVLinear"]


class SwappedQKVLinear(QKVLinear):
    """`QKVLinear` for checkpoints whose rotary embeddings rotate each pair of features in the opposite direction.

    The two features of a pair are exchanged at load, in queries and keys alike, which leaves scores as they are.
    """

    def in_order(self, part: str | None, tensor: Tensor) -> Tensor:
        if part not in ("q", "k"):
            return tensor
        return tensor.view(-1, self.head_dim, *tensor.shape[1:]).roll(self.head_dim // 2, 1).view_as(tensor)
