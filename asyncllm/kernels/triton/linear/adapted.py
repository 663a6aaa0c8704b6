"""A layer's own product of few tokens, and the products with its adapters' A at the same time.

The product waits for memory, and its blocks leave most threads of a multiprocessor unused. It releases the kernel of A
when all of its blocks run and have waited for x, so that this one takes hardly any time of its own.
"""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.lora import FEW_ROWS, LoRAWeights, RowGroups, ShrunkRows
from asyncllm.kernels.triton.linear.product import by_tensor_cores, for_few_tokens, linear
from asyncllm.kernels.triton.linear.small import GemvConfig
from asyncllm.kernels.triton.lora import shrink_lora
from asyncllm.kernels.triton.lora_rows import MAX_RANK, empty_sums, shrink_rows

__all__ = ["linear_shrink_lora"]


def linear_shrink_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    lora: LoRAWeights,
    *,
    num_single: int = 0,
    groups: RowGroups | None = None,
) -> tuple[Tensor, ShrunkRows]:
    rows = x.contiguous()
    few = groups is None and len(rows) <= FEW_ROWS and lora.b.shape[-1] <= MAX_RANK
    config = for_few_tokens(rows, weight) if few else None
    if config is None or isinstance(config, GemvConfig):
        # A single token has so many blocks that the last of them begin when the product is nearly done.
        shrunk = shrink_lora(rows, slots, lora, num_single=num_single, groups=groups)
        return linear(rows, weight, bias), shrunk
    # Allocated first: memory that the product gives back is in use until it ends.
    h = empty_sums(rows, lora)
    y = by_tensor_cores(rows, weight, bias, config=config, release_first=False)
    return y, ShrunkRows(shrink_rows(rows, slots, lora, h, beside=True), h[:, len(rows) :])
