"""Files that the formats' own libraries wrote: what is decoded here is what they decode, and is packed as they pack it.

A program in `golden/` writes each of them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm.models.loading.stream import DTYPES
from asyncllm.quant.awq import Gemm, encode_gemm
from asyncllm.quant.bitsandbytes import BitsAndBytes
from asyncllm.quant.compressed import PackQuantized, encode_packed
from asyncllm.quant.expansion import expansion_of_codes
from asyncllm.quant.settings import Header
from tests.quant.golden.write_awq import GROUP_SIZE
from tests.quant.golden.write_compressed import KINDS, K, N
from tests.quant.golden.write_expanded import FLOATS, FOUR_BITS

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


def stored_of(name: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Header]]:
    """The tensors of a weight of expanded.safetensors, what its library makes of them, and their headers."""
    stored = load_file(GOLDEN / "expanded.safetensors")
    own = {key.removeprefix(f"{name}."): tensor for key, tensor in stored.items() if key.startswith(f"{name}.")}
    unpacked = own.pop("unpacked")
    names = {dtype: name for name, dtype in DTYPES.items()}
    return own, unpacked, {key: Header(names[each.dtype], tuple(each.shape)) for key, each in own.items()}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_four_bits_of_compressed_tensors(name: str) -> None:
    stored, unpacked, headers = stored_of(name)
    whole = "weight_global_scale" if name == "nvfp4" else None
    expansion = expansion_of_codes("w", headers, codes="weight_packed", whole=whole, divided=True)
    assert expansion.sources.keys() == stored.keys()
    # The library divides in bfloat16.
    torch.testing.assert_close(expansion.expand(stored), unpacked.float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_of_bitsandbytes(name: str) -> None:
    stored, unpacked, headers = stored_of(name)
    (expansion,) = BitsAndBytes().expansions(headers, lambda names: {each: stored[each] for each in names})
    made = expansion.expand({suffix: stored[source] for suffix, source in expansion.sources.items()})
    assert torch.equal(made, unpacked)


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
