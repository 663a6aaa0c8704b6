"""Putting together what a scoring request gave chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["concatenate"]


def concatenate(chunks: Sequence[Tensor]) -> Tensor:
    """Logits [chunk, vocab] of consecutive chunks, tensors or lists, as one tensor [tokens, vocab]."""
    return torch.cat([torch.as_tensor(chunk) for chunk in chunks])
