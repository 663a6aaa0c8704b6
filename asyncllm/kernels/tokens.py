"""What a step leaves behind: the drawn tokens, for the next step and for the host."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["record_tokens"]


@op("tokens:record_tokens")
def record_tokens(tokens: Tensor, flags: Tensor, slots: Tensor, last_tokens: Tensor, results: Tensor) -> None:
    """Make the tokens of R rows the next inputs of their slots, and put tokens and flags side by side for the host.

    tokens [R] int64, flags [R] int32, slots [R] int32 (-1: a padding row, of which nothing is kept); writes
    last_tokens [S] int64 at the slots, and results [2, R] int32: tokens, flags.
    """
    used = slots >= 0
    last_tokens[slots[used].long()] = tokens[used]
    results[0] = tokens
    results[1] = flags
