"""What a step leaves behind: one program notes the tokens of a whole decode batch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["record_tokens"]

BLOCK = 256
"""Rows per program: a whole decode batch of the usual size."""


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["tokens", "flags", "slots", "last_tokens", "results"],
)
def record_tokens_kernel(
    tokens, flags, slots, last_tokens, results, num_rows, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    token = tl.load(tokens + rows, mask=inside, other=0)
    slot = tl.load(slots + rows, mask=inside, other=-1)
    tl.store(last_tokens + slot, token, mask=inside & (slot >= 0))
    tl.store(results + rows, token.to(tl.int32), mask=inside)
    tl.store(results + num_rows + rows, tl.load(flags + rows, mask=inside, other=0), mask=inside)


def record_tokens(tokens: Tensor, flags: Tensor, slots: Tensor, last_tokens: Tensor, results: Tensor) -> None:
    num_rows = tokens.shape[0]
    if num_rows:
        grid = (-(-num_rows // BLOCK), 1, 1)
        launch(record_tokens_kernel, grid, (tokens, flags, slots, last_tokens, results), (num_rows,), BLOCK=BLOCK)
