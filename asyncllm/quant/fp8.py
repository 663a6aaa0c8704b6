"""fp8 in the formats of DeepSeek-V3 and Qwen3 (`quant_method` "fp8") and of Meta (`fbgemm_fp8`), and unquantized
weights that are rounded to fp8 at load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.scaled import GROUP, LARGEST
from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.expansion import Expansion, expansion_of_codes, modules_of
from asyncllm.quant.scaled import Scaled, holds_codes, scaled
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["Float8", "Float8AtLoad", "Float8OfRows", "block_settings", "round_blocks"]

_PLAIN = frozenset({"F16", "BF16", "F32"})


@register("fp8")
class Float8(Scheme):
    """`weight` in e4m3, with `weight_scale_inv` for blocks of 128 x 128, or with `weight_scale`. Both are multiplied.
    Where the settings say so, experts are in e2m1 with an exponent for each group (MiMo-V2.6), and expanded."""

    def __init__(self, *, block: bool, static: bool, four_bits: bool = False) -> None:
        self._block, self._static, self._four_bits = block, static, four_bits

    @classmethod
    def read(cls, settings: QuantSettings) -> Float8:
        settings.expect("fmt", "e4m3", "float8_e4m3fn")
        settings.expect("weight_block_size", [GROUP, GROUP])
        settings.expect("activation_scheme", "dynamic", "static")
        settings.expect("scale_fmt", "ue8m0", "float")
        settings.expect("expert_dtype", "fp8")
        settings.expect("store_dtype", "fp8", "mxfp4")
        settings.expect("mxfp4_block_size", 32)
        block, static = settings.get("weight_block_size") is not None, settings.get("activation_scheme") == "static"
        if block and static:
            settings.unsupported("activation_scheme", "Blocks are for activations of groups, whose scales are dynamic.")
        return cls(block=block, static=static, four_bits=settings.get("store_dtype") == "mxfp4")

    def expansions(
        self, headers: Mapping[str, Header], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> Iterator[Expansion]:
        for module, tensors in modules_of(headers).items() if self._four_bits else ():
            if "weight" in tensors and tensors["weight"].dtype == "U8":
                yield expansion_of_codes(module, tensors, exponents=True)

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        inverse, plain = "weight_scale_inv" in tensors, "weight_scale" in tensors
        if not inverse and not plain and not holds_codes(tensors):
            return None
        scale = "weight_scale_inv" if inverse or (self._block and not plain) else "weight_scale"
        return scaled(torch.float8_e4m3fn, scale, tensors, block=self._block, static=self._static)


@register("fbgemm_fp8")
class Float8OfRows(Scheme):
    """`weight` in e4m3 with a `weight_scale` for each output feature, and activations with a scale for each token.

    FBGEMM's kernels clip activations at `activation_scale_ub`. Here a token's scale is always that of its largest
    value.
    """

    @classmethod
    def read(cls, settings: QuantSettings) -> Float8OfRows:
        return cls()

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "weight_scale" not in tensors and not holds_codes(tensors):
            return None
        return scaled(torch.float8_e4m3fn, "weight_scale", tensors, block=False, static=False)


@register("fp8 at load")
class Float8AtLoad(Scheme):
    """One scale for each output feature of the projections; embeddings, routers and norms stay unquantized."""

    at_load: ClassVar[bool] = True

    @classmethod
    def read(cls, settings: QuantSettings) -> Float8AtLoad:
        return cls()

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        if "weight" not in tensors or tensors["weight"].dtype not in _PLAIN:
            return None
        return Scaled(torch.float8_e4m3fn, None, "channel")


def round_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [N, K] float32. Return codes e4m3 [N, K], and for each block of 128 x 128 a scale, float32
    [ceil(N / 128), ceil(K / 128)]."""
    (n, k), largest = weight.shape, LARGEST[torch.float8_e4m3fn]
    padded = F.pad(weight, (0, -k % GROUP, 0, -n % GROUP))
    blocks = padded.view(-(-n // GROUP), GROUP, -(-k // GROUP), GROUP)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / largest
    codes = (blocks / scales).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:n, :k].contiguous(), scales[:, 0, :, 0].contiguous()


def block_settings(plain: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of weights from `round_blocks`, whose scales are named `weight_scale_inv`."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": list(plain),
    }
