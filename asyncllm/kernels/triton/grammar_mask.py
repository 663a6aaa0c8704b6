"""Removes from rows of logits the tokens that a grammar forbids: one program per row and TOKENS tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["keep_only"]

TOKENS = 4096


@triton.jit
def keep_only_kernel(
    logits_ptr,
    row_ptr,
    word_ptr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < VOCAB
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.load(row_ptr + index)
    words = tl.load(word_ptr + index * WORDS + tokens // 32, mask=inside, other=0)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    # Only forbidden entries are written, and nothing is read.
    tl.store(logits_ptr + row * STRIDE + tokens, float("-inf"), mask=inside & forbidden)


def keep_only(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    if not len(rows):
        return
    vocab_size = logits.shape[1]
    launch(
        keep_only_kernel,
        (len(rows), -(-vocab_size // TOKENS), 1),
        (logits, rows.contiguous(), words.contiguous()),
        (),
        VOCAB=vocab_size,
        STRIDE=logits.stride(0) if len(logits) > 1 else vocab_size,
        WORDS=words.shape[1],
        TOKENS=TOKENS,
    )
