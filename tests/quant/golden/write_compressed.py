"""Write compressed.safetensors: weights that compressed-tensors packed, and what it unpacks from them.

pip install compressed-tensors==0.20.0, then: python tests/quant/golden/write_compressed.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

KINDS = {"w4_sym_g32": (4, True, 32), "w4_asym_g64": (4, False, 64), "w8_sym_channel": (8, True, -1)}
N, K = 32, 128


def main() -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, (bits, symmetric, size) in KINDS.items():
        groups = 1 if size == -1 else K // size
        strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
        args = QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = torch.randn(N, K, generator=generator).to(torch.bfloat16)
        parts = weight.float().view(N, groups, -1)
        low, high = parts.amin(-1), parts.amax(-1)
        half = 2 ** (bits - 1)
        scales = parts.abs().amax(-1) / (half - 0.5) if symmetric else (high - low) / (2 * half - 1)
        zeros = torch.zeros_like(scales) if symmetric else (-low / scales).round().clamp(0, 2 * half - 1) - half
        state = {
            "weight": weight,
            "weight_scale": scales.to(torch.bfloat16),
            "weight_zero_point": zeros.to(torch.int8),
        }
        packed = PackedQuantizationCompressor.compress(state, scheme)
        unpacked = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
        tensors[f"{name}.unpacked"] = unpacked.contiguous()
    save_file(tensors, Path(__file__).with_name("compressed.safetensors"))


if __name__ == "__main__":
    main()
