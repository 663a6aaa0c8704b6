"""Kinds of checkpoints whose weights are expanded as they are read: random codes and scales, and what numpy makes of
them by the formats' definitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.quant.formats import from_e4m3

__all__ = ["EXPANDED", "Expanded"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)  # fmt: skip

Random = np.random.Generator
Tensors = dict[str, np.ndarray | Tensor]


@dataclass(frozen=True)
class Expanded:
    """A kind of checkpoint. `make`: output and input features, random numbers -> tensors by suffix, weight."""

    config: Mapping[str, Any]
    make: Callable[[int, int, Random], tuple[Tensors, np.ndarray]]

    def random(self, n: int, k: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """Tensors by suffix, and the weight that they stand for, float32."""
        tensors, weight = self.make(n, k, np.random.default_rng(seed))
        stored = {
            suffix: each if isinstance(each, Tensor) else torch.from_numpy(np.array(each, order="C"))
            for suffix, each in tensors.items()
        }
        return stored, torch.from_numpy(weight).float().contiguous()


def e4m3(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def pairs(codes: np.ndarray, high_first: bool = False) -> np.ndarray:
    first, second = codes[..., ::2], codes[..., 1::2]
    return (first << 4 | second if high_first else first | second << 4).astype(np.uint8)


def e2m1(n: int, k: int, random: Random) -> tuple[np.ndarray, np.ndarray]:
    codes = random.integers(0, 16, (n, k))
    return codes, E2M1[codes & 7] * np.where(codes & 8, -1, 1)


def repeated(scales: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scales.astype(np.float64), rows, 0), columns, 1)[: shape[0], : shape[1]]


def nvfp4(n: int, k: int, random: Random, *, divided: bool) -> tuple[Tensors, np.ndarray]:
    codes, values = e2m1(n, k, random)
    scales = random.integers(0x40, 0x70, (n, k // 16)).astype(np.uint8)
    whole = np.float32(400.0 if divided else 1 / 400)
    weight = values * repeated(from_e4m3(scales), 1, 16, (n, k)) * (1 / np.float64(whole) if divided else whole)
    if divided:
        own = {"weight_packed": pairs(codes), "weight_global_scale": np.full(1, whole)}
        return {**own, "weight_scale": e4m3(scales), "input_global_scale": np.ones(1, np.float32)}, weight
    own = {"weight": pairs(codes), "weight_scale_2": np.array(whole)}
    return {**own, "weight_scale": e4m3(scales), "input_scale": np.ones((), np.float32)}, weight


def mxfp4(n: int, k: int, random: Random, *, name: str) -> tuple[Tensors, np.ndarray]:
    codes, values = e2m1(n, k, random)
    exponents = random.integers(119, 126, (n, k // 32)).astype(np.uint8)
    weight = values * repeated(2.0 ** (exponents.astype(int) - 127), 1, 32, (n, k))
    return {name: pairs(codes), "weight_scale": exponents}, weight


def mxfp8(n: int, k: int, random: Random) -> tuple[Tensors, np.ndarray]:
    codes = random.integers(0, 0x70, (n, k)).astype(np.uint8) | random.integers(0, 2, (n, k)).astype(np.uint8) << 7
    exponents = random.integers(116, 119, (n, k // 32)).astype(np.uint8)
    weight = from_e4m3(codes) * repeated(2.0 ** (exponents.astype(int) - 127), 1, 32, (n, k))
    return {"weight": e4m3(codes), "weight_scale": exponents}, weight


def eight_bits(
    n: int, k: int, random: Random, *, floats: bool, block: tuple[int, int], zeros: bool = False, axes: int = 2
) -> tuple[Tensors, np.ndarray]:
    """`block`: (0, 0) for a scale of the tensor, (1, 0) for one of each output feature."""
    rows, columns = block[0] or n, block[1] or k
    shape = (-(-n // rows), -(-k // columns))
    scales = (random.random(shape) * 0.01 / (100 if floats else 10) + 1e-4).astype(np.float32)
    if floats:
        codes = random.integers(0, 0x7F, (n, k)).astype(np.uint8) | random.integers(0, 2, (n, k)).astype(np.uint8) << 7
        values = from_e4m3(codes)
    else:
        codes = random.integers(-128, 128, (n, k)).astype(np.int8)
        values = codes.astype(np.float64)
    tensors: Tensors = {"weight": e4m3(codes) if floats else codes}
    tensors["weight_scale"] = {1: scales.reshape(-1), 2: scales, 4: scales[:, None, :, None]}[axes]
    if zeros:
        points = random.integers(-5, 6, shape).astype(np.int8)
        tensors["weight_zero_point"] = points
        values = values - repeated(points, rows, columns, (n, k))
    return tensors, values * repeated(scales, rows, columns, (n, k))


def four_bits(n: int, k: int, random: Random, *, nested: bool) -> tuple[Tensors, np.ndarray]:
    codes, blocks = random.integers(0, 16, n * k), -(-n * k // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    tensors: Tensors = {"weight": pairs(codes, high_first=True)[:, None], "weight.quant_map": NF4.astype(np.float32)}
    if nested:
        outer = (random.random(-(-blocks // 256)) * 0.2).astype(np.float32)
        table = np.sort(random.random(256) * 2 - 1).astype(np.float32)
        inner = random.integers(0, 256, blocks)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        largest = table[inner].astype(np.float64) * outer[np.arange(blocks) // 256] + 0.25
        tensors["weight.absmax"] = inner.astype(np.uint8)
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
    else:
        outer = (random.random(blocks) * 0.3).astype(np.float32)
        tensors["weight.absmax"], largest = outer, outer.astype(np.float64)
    blob = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = blob
    return tensors, (NF4[codes] * np.repeat(largest, 64)[: n * k]).reshape(n, k)


def llm_int8(n: int, k: int, random: Random) -> tuple[Tensors, np.ndarray]:
    codes, largest = random.integers(-127, 128, (n, k)).astype(np.int8), random.random(n).astype(np.float32) * 0.3
    tensors: Tensors = {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return tensors, codes * largest.astype(np.float64)[:, None] / 127


def compressed(kind: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": kind}}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def of(function: Callable[..., tuple[Tensors, np.ndarray]], **options: Any) -> Any:
    return lambda n, k, random: function(n, k, random, **options)


_FOUR = numbers(4, "float", "tensor_group", group_size=16)
_BNB = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "load_in_4bit": True}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
_QUARK_FP4 = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False,
    "ch_axis": -1, "observer_cls": "PerBlockMXObserver", "round_method": "half_even", "symmetric": None,
}  # fmt: skip

EXPANDED: dict[str, Expanded] = {
    "bnb-nf4": Expanded(_BNB, of(four_bits, nested=False)),
    "bnb-nf4-nested": Expanded({**_BNB, "bnb_4bit_use_double_quant": True}, of(four_bits, nested=True)),
    "bnb-int8": Expanded({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "nvfp4": Expanded(
        compressed("nvfp4-pack-quantized", _FOUR, {**_FOUR, "dynamic": "local"}), of(nvfp4, divided=True)
    ),
    "nvfp4-modelopt": Expanded({**_MODELOPT, "quant_algo": "NVFP4"}, of(nvfp4, divided=False)),
    "mxfp4": Expanded(
        compressed("mxfp4-pack-quantized", numbers(4, "float", "group", group_size=32), None),
        of(mxfp4, name="weight_packed"),
    ),
    "fp8-mxfp4": Expanded(
        {"quant_method": "fp8", "fmt": "e4m3", "store_dtype": "mxfp4", "mxfp4_block_size": 32}, of(mxfp4, name="weight")
    ),
    "mxfp4-quark": Expanded(
        {
            "quant_method": "quark", "layer_quant_config": {}, "layer_type_quant_config": {},
            "global_quant_config": {"weight": _QUARK_FP4, "input_tensors": {**_QUARK_FP4, "is_dynamic": True}},
        },
        of(mxfp4, name="weight"),
    ),
    "mxfp8": Expanded(compressed("mxfp8-quantized", numbers(8, "float", "group", group_size=32), None), mxfp8),
    "fp8-channel": Expanded(
        compressed("float-quantized", numbers(8, "float", "channel"), None),
        of(eight_bits, floats=True, block=(1, 0)),
    ),
    "fp8-tensor": Expanded(
        compressed("float-quantized", numbers(8, "float", "tensor"), None),
        of(eight_bits, floats=True, block=(0, 0), axes=1),
    ),
    "fp8-blocks": Expanded(
        compressed("float-quantized", numbers(8, "float", "block", block_structure=[64, 32]), None),
        of(eight_bits, floats=True, block=(64, 32)),
    ),
    "fp8-modelopt-blocks": Expanded(
        {**_MODELOPT, "quant_algo": "fp8_pb_wo"}, of(eight_bits, floats=True, block=(128, 128), axes=4)
    ),
    "int8-weights": Expanded(
        compressed("int-quantized", numbers(8, "int", "channel"), None), of(eight_bits, floats=False, block=(1, 0))
    ),
    "int8-asymmetric": Expanded(
        compressed(
            "int-quantized", numbers(8, "int", "channel", symmetric=False), numbers(8, "int", "token", dynamic=True)
        ),
        of(eight_bits, floats=False, block=(1, 0), zeros=True),
    ),
    "int4-in-groups": Expanded(
        compressed(
            "int-quantized", numbers(4, "int", "group", group_size=64), numbers(8, "int", "token", dynamic=True)
        ),
        of(eight_bits, floats=False, block=(1, 64)),
    ),
}  # fmt: skip
"""By name."""
