"""Write awq.safetensors: a weight that AutoAWQ packed, and what it unpacks from that.

Unpack the source of autoawq 0.2.9 (pip download --no-deps --no-binary :all: autoawq==0.2.9), whose package imports
models that newer libraries no longer have, then: python tests/quant/golden/write_awq.py autoawq-0.2.9
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

BITS, GROUP_SIZE, N, K = 4, 32, 64, 128


def main(source: Path) -> None:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        package = ModuleType(name)
        package.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = package
    # Nothing of it is called here.
    sys.modules["accelerate"] = ModuleType("accelerate")
    gemm = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm

    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(K, N, bias=False).half()
    parts = torch.randn(N, K // GROUP_SIZE, GROUP_SIZE, generator=generator)
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    # AutoAWQ rounds a weight that is rounded already.
    linear.weight.data = ((codes - zeros[..., None]) * scales.float()[..., None]).view(N, K).half()
    packed = gemm.from_linear(linear, BITS, GROUP_SIZE, False, scales.t().contiguous(), zeros.t().contiguous())
    tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    unpacked = dequantize(*tensors.values(), BITS, GROUP_SIZE).t()
    save_file(
        {name: tensor.contiguous() for name, tensor in {**tensors, "unpacked": unpacked}.items()},
        Path(__file__).with_name("awq.safetensors"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
