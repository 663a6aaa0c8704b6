"""Files that the formats' own libraries wrote: what is decoded here is what they decode, and is packed as they pack it.

A program in `golden/` writes each of them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncllm.quant.awq import Gemm, encode_gemm
from asyncllm.quant.compressed import PackQuantized, encode_packed
from tests.quant.golden.write_awq import GROUP_SIZE
from tests.quant.golden.write_compressed import KINDS, K, N

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_of_compressed_tensors(kind: str) -> None:
    bits, symmetric, size = KINDS[kind]
    stored = {
        name.removeprefix(f"{kind}."): tensor
        for name, tensor in load_file(GOLDEN / "compressed.safetensors").items()
        if name.startswith(f"{kind}.")
    }
    unpacked = stored.pop("unpacked")
    method = PackQuantized(bits, size, torch.bfloat16, symmetric=symmetric)
    assert {suffix: tuple(tensor.shape) for suffix, tensor in stored.items()} == method.tensors(N, K)
    decoded = method.decode(stored, N, K)
    spread = [each.float().t().repeat_interleave(K // len(each), 1) for each in (decoded.zeros, decoded.scales)]
    assert torch.equal(((decoded.codes.float() - spread[0]) * spread[1]).to(torch.bfloat16), unpacked)
    packed = encode_packed(decoded, bits, symmetric=symmetric)
    assert packed.keys() == stored.keys()
    for suffix, tensor in stored.items():
        assert torch.equal(packed[suffix], tensor), suffix


def test_words_of_autoawq() -> None:
    stored = load_file(GOLDEN / "awq.safetensors")
    unpacked = stored.pop("unpacked")
    n, k = unpacked.shape
    method = Gemm(4, GROUP_SIZE, torch.float16)
    assert {suffix: tuple(tensor.shape) for suffix, tensor in stored.items()} == method.tensors(n, k)
    decoded = method.decode(stored, n, k)
    codes, zeros = decoded.codes.half(), decoded.zeros.half().t().repeat_interleave(GROUP_SIZE, 1)
    assert torch.equal((codes - zeros) * decoded.scales.t().repeat_interleave(GROUP_SIZE, 1), unpacked)
    packed = encode_gemm(decoded)
    assert packed.keys() == stored.keys()
    for suffix, tensor in stored.items():
        assert torch.equal(packed[suffix], tensor), suffix
