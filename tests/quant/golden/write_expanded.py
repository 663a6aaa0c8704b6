"""Write expanded.safetensors: weights that compressed-tensors and bitsandbytes rounded, and what they make of them.

pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2, then: python tests/quant/golden/write_expanded.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FLOATS = {"nvfp4": 16, "mxfp4": 32}
FOUR_BITS = {"nf4": ("nf4", False), "nf4_nested": ("nf4", True), "fp4": ("fp4", False)}
N, K = 32, 96


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, size in FLOATS.items():
        tensors |= {f"{name}.{key}": each for key, each in _floats(name, size, generator).items()}
    for name, (kind, nested) in FOUR_BITS.items():
        tensors |= {f"{name}.{key}": each for key, each in _four_bits(kind, nested, generator).items()}
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, Path(__file__).with_name("expanded.safetensors"))


def _floats(name: str, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    compressor = BaseCompressor.get_value_from_registry(f"{name}-pack-quantized")
    strategy = "tensor_group" if name == "nvfp4" else "group"
    args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(N, K, generator=generator).to(torch.bfloat16)
    largest = weight.float().view(N, K // size, size).abs().amax(-1)
    state = {"weight": weight}
    if name == "nvfp4":
        whole = 448 * 6 / weight.float().abs().amax().reshape(1)
        scales = (largest / 6 * whole).to(torch.float8_e4m3fn).to(torch.bfloat16)
        state |= {"weight_scale": scales, "weight_global_scale": whole}
    else:
        state["weight_scale"] = torch.exp2(largest.log2().floor() - 2).to(torch.bfloat16)
    packed = compressor.compress(state, scheme)
    return {**packed, "unpacked": compressor.decompress(packed, scheme)["weight"]}


def _four_bits(kind: str, nested: bool, generator: torch.Generator) -> dict[str, Tensor]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(N, K, generator=generator)
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    beside = {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}
    return {"weight": packed, **beside, "unpacked": dequantize_4bit(packed, state)}


if __name__ == "__main__":
    main()
