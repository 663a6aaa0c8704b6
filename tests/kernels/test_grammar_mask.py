"""Masks of grammars: only tokens with a bit keep their logits, in the reference and in the kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import sampling
from asyncllm.kernels.triton import grammar_mask
from tests.kernels.device import DEVICE, fresh_seed, interpreted, random


def packed(allowed: Tensor) -> Tensor:
    """Words of the bits [N, V]. Bits beyond the vocabulary mean nothing, and are set."""
    count, vocab_size = allowed.shape
    bits = torch.ones(count, -(-vocab_size // 32) * 32, dtype=torch.bool)
    bits[:, :vocab_size] = allowed
    return (bits.view(count, bits.shape[1] // 32, 32) * 2 ** torch.arange(32)).sum(-1).to(torch.int32).to(DEVICE)


def check(keep_only: Any, vocab_size: int, rows: list[int], *, of: int, seed: int) -> None:
    """Rows are the middle of wider ones, around which nothing may be written."""
    wide = random(of, vocab_size + 64, seed=seed)
    allowed = torch.rand(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.5
    expected = wide.clone()
    for row, bits in zip(rows, allowed.to(DEVICE), strict=True):
        expected[row, 32 : 32 + vocab_size].masked_fill_(~bits, -math.inf)
    keep_only(wide[:, 32 : 32 + vocab_size], torch.tensor(rows, dtype=torch.int64, device=DEVICE), packed(allowed))
    assert torch.equal(wide, expected)


@interpreted
@pytest.mark.parametrize("keep_only", [sampling.keep_only, grammar_mask.keep_only], ids=["op", "launcher"])
def test_only_tokens_with_a_bit_are_kept(keep_only: Any) -> None:
    seed = fresh_seed()
    for vocab_size in (1, 31, 32, 33, 70, grammar_mask.TOKENS + 33):
        check(keep_only, vocab_size, [3, 1], of=4, seed=seed)
    check(keep_only, 40, [], of=2, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 151_936, 32_003])
def test_only_tokens_with_a_bit_are_kept_on_gpu(vocab_size: int) -> None:
    seed = fresh_seed()
    check(sampling.keep_only, vocab_size, [0], of=1, seed=seed)
    check(sampling.keep_only, vocab_size, list(range(63, -1, -1)), of=65, seed=seed)
