"""Quantized checkpoints, written and read here by the bits of their files: nothing is shared with `asyncllm.quant`.

A tensor of a few bits is a matrix of bits, the lowest of each number first, along the axis that the format packs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, np.ndarray]

AWQ_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output channel in nibble i of a word of the gemm layout."""


def to_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[A, B] -> int32 [A, B bits / 32]."""
    each = np.unpackbits(numbers.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(each.reshape(len(numbers), -1), axis=-1, bitorder="little").view("<i4")


def from_words(words: np.ndarray, bits: int) -> np.ndarray:
    """[A, B] int32 -> [A, B 32 / bits]."""
    each = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return (each.reshape(len(words), -1, bits) * (1 << np.arange(bits))).sum(-1)


@dataclass(frozen=True)
class Format:
    """How one kind of checkpoint is written and read."""

    config: Mapping[str, Any]
    bits: int
    group_size: int
    encode: Callable[[Format, np.ndarray, np.ndarray, np.ndarray, np.ndarray], Tensors]
    """codes [N, K], scales [G, N], zeros [G, N], group of each input feature [K] -> tensors by suffix."""
    decode: Callable[[Format, Tensors], np.ndarray]
    """Tensors by suffix -> weight [N, K]."""
    symmetric: bool = False
    shuffled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def quantize(self, weight: np.ndarray, seed: int) -> Tensors:
        """Round to nearest."""
        n, k = weight.shape
        size = k if self.group_size == -1 else self.group_size
        group_of = np.arange(k) // size
        if self.shuffled:
            group_of = np.random.default_rng(seed).permutation(group_of)
        codes, top = np.zeros((n, k), int), 2**self.bits - 1
        scales, zeros = np.zeros((k // size, n), np.float16), np.zeros((k // size, n), int)
        for group in range(k // size):
            columns = group_of == group
            part = weight[:, columns]
            if self.symmetric:
                scales[group] = (np.abs(part).max(1) / (top / 2)).astype(np.float16)
                zeros[group] = (top + 1) // 2
            else:
                low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
                scales[group] = ((high - low) / top).astype(np.float16)
                zeros[group] = np.clip(np.round(-low / scales[group].astype(float)), 0, top)
            scale = scales[group].astype(float)[:, None]
            codes[:, columns] = np.clip(np.round(part / scale) + zeros[group][:, None], 0, top)
        return self.encode(self, codes, scales, zeros, group_of)


def _gemm(fmt: Format, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> Tensors:
    def pack(numbers: np.ndarray) -> np.ndarray:
        return to_words(numbers.reshape(len(numbers), -1, 8)[..., AWQ_CHANNELS].reshape(len(numbers), -1), 4)

    return {"qweight": pack(codes.T), "qzeros": pack(zeros), "scales": scales}


def _from_gemm(fmt: Format, tensors: Tensors) -> np.ndarray:
    def unpack(words: np.ndarray) -> np.ndarray:
        found = from_words(words, 4).reshape(len(words), -1, 8)
        numbers = np.empty_like(found)
        numbers[..., AWQ_CHANNELS] = found
        return numbers.reshape(len(words), -1)

    codes, zeros, scales = unpack(tensors["qweight"]), unpack(tensors["qzeros"]), tensors["scales"]
    groups = np.arange(len(codes)) * len(scales) // len(codes)
    return ((codes - zeros[groups]) * scales.astype(np.float64)[groups]).T


def _gemv(fmt: Format, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> Tensors:
    columns = -(-len(scales) // 8)
    multiple = {64: 2, 32: 4}.get(fmt.group_size, 1)
    columns = -(-columns // multiple) * multiple * 8
    padding = ((0, 0), (0, columns - len(scales)))
    return {
        "qweight": to_words(codes, 4),
        "qzeros": to_words(np.pad(zeros.T, padding), 4),
        "scales": np.pad(scales.T, padding),
    }


def _from_gemv(fmt: Format, tensors: Tensors) -> np.ndarray:
    codes, zeros = from_words(tensors["qweight"], 4), from_words(tensors["qzeros"], 4)
    size = codes.shape[1] if fmt.group_size == -1 else fmt.group_size
    groups = np.arange(codes.shape[1]) // size
    return (codes - zeros[:, groups]) * tensors["scales"].astype(np.float64)[:, groups]


def _gptq(fmt: Format, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> Tensors:
    stored = zeros if fmt.config.get("checkpoint_format") == "gptq_v2" else zeros - 1
    if (stored < 0).any():
        # As GPTQModel subtracts from whole words.
        ones = sum(1 << place for place in range(0, 32, fmt.bits))
        words = (to_words(zeros, fmt.bits).astype(np.int64) - ones).astype(np.int32)
    else:
        words = to_words(stored, fmt.bits)
    tensors = {"qweight": to_words(codes, fmt.bits).T, "qzeros": words, "scales": scales}
    if fmt.options.get("g_idx", True):
        tensors["g_idx"] = group_of.astype(np.int32)
    if fmt.options.get("bias"):
        tensors["bias"] = np.zeros(len(codes), np.float16)
    return tensors


def _from_gptq(fmt: Format, tensors: Tensors) -> np.ndarray:
    words = tensors["qzeros"]
    if fmt.config.get("checkpoint_format") == "gptq_v2":
        zeros = from_words(words, fmt.bits)
    elif "meta" in fmt.config and not fmt.symmetric:
        ones = sum(1 << place for place in range(0, 32, fmt.bits))
        zeros = from_words((words.astype(np.int64) + ones).astype(np.int32), fmt.bits)
    else:
        zeros = from_words(words, fmt.bits) + 1
    codes = from_words(tensors["qweight"].T, fmt.bits)
    groups = tensors.get("g_idx", np.arange(codes.shape[1]) * len(zeros) // codes.shape[1])
    return (codes - zeros[groups].T) * tensors["scales"].astype(np.float64)[groups].T


def _packed(fmt: Format, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> Tensors:
    tensors = {
        "weight_packed": to_words(codes, fmt.bits),
        "weight_scale": scales.T,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if not fmt.symmetric:
        tensors["weight_zero_point"] = to_words(zeros, fmt.bits).T
    if fmt.shuffled:
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    return tensors


def _from_packed(fmt: Format, tensors: Tensors) -> np.ndarray:
    half = 2 ** (fmt.bits - 1)
    codes, scales = from_words(tensors["weight_packed"], fmt.bits) - half, tensors["weight_scale"].astype(np.float64)
    zeros = np.zeros(scales.shape, int)
    if "weight_zero_point" in tensors:
        zeros = from_words(tensors["weight_zero_point"].T, fmt.bits).T - half
    groups = tensors.get("weight_g_idx", np.arange(codes.shape[1]) * scales.shape[1] // codes.shape[1])
    return (codes - zeros[:, groups]) * scales[:, groups]


def awq(group_size: int, version: str = "gemm") -> Format:
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": version,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    encode, decode = (_gemm, _from_gemm) if version == "gemm" else (_gemv, _from_gemv)
    return Format(config, 4, group_size, encode, decode)


def gptq(
    bits: int, group_size: int, *, symmetric: bool = True, shuffled: bool = False, second: bool = False, **options: Any
) -> Format:
    config: dict[str, Any] = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": shuffled,
    }  # fmt: skip
    if second:
        config["checkpoint_format"] = "gptq_v2"
    elif options.pop("gptqmodel", False):
        config["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
    return Format(config, bits, group_size, _gptq, _from_gptq, symmetric, shuffled, options)


def packed(bits: int, group_size: int, *, symmetric: bool = True, shuffled: bool = False) -> Format:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": None if group_size == -1 else group_size,
        "strategy": "channel" if group_size == -1 else "group", "dynamic": False,
        "actorder": "group" if shuffled else None,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip
    return Format(config, bits, group_size, _packed, _from_packed, symmetric, shuffled)


E4M3 = np.array([code / 512 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)])
"""The numbers from 0 on of a type of eight bits: a sign, four of exponent, three of fraction."""


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """The codes of the nearest numbers, to even ones in the middle between two."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(numbers))
    codes += (codes % 2 == 1) & (np.append(middles, np.inf)[codes] == np.abs(numbers))
    return (codes + 128 * np.signbit(numbers)).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    return E4M3[codes & 127] * np.where(codes & 128, -1, 1)


@dataclass(frozen=True)
class Eight:
    """A kind of checkpoint with weights of eight bits: in int8, or as codes in `E4M3`."""

    config: Mapping[str, Any]
    kind: str
    layout: str
    """tensor, channel or block."""
    scale: str
    axes: int = 2
    """Of the scale."""
    static: bool = False

    def quantize(self, weight: np.ndarray, seed: int) -> Tensors:
        n, k = weight.shape
        shape = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[self.layout]
        scales = np.array(
            [
                [
                    np.abs(weight[row : row + shape[0], column : column + shape[1]]).max()
                    for column in range(0, k, shape[1])
                ]
                for row in range(0, n, shape[0])
            ]
        ).astype(np.float32) / np.float32(127 if self.kind == "int8" else 448)
        divided = weight / _spread(scales, weight.shape)
        codes = np.round(divided).astype(np.int8) if self.kind == "int8" else to_e4m3(divided)
        stored = {"weight": codes, self.scale: scales.reshape(-1)[: scales.size] if self.axes < 2 else scales}
        if self.axes == 0:
            stored[self.scale] = scales.reshape(())
        return {**stored, "input_scale": np.full(1, 0.02, np.float32)} if self.static else stored

    def decode(self, fmt: Eight, tensors: Tensors) -> np.ndarray:
        codes, scales = tensors["weight"], tensors[self.scale]
        values = codes.astype(np.float64) if self.kind == "int8" else from_e4m3(codes)
        return values * _spread(scales.reshape(-1, scales.shape[1] if scales.ndim == 2 else 1), values.shape)


def _spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale for each number: of the tensor, its row or its block."""
    rows = np.zeros(shape[0], int) if len(scales) == 1 else np.arange(shape[0])
    if len(scales) not in (1, shape[0]) or scales.shape[1] > 1:
        rows = np.arange(shape[0]) // 128
    columns = np.arange(shape[1]) // 128 if scales.shape[1] > 1 else np.zeros(shape[1], int)
    return scales.astype(np.float64)[rows][:, columns]


def fp8(layout: str, *, static: bool = False) -> Eight:
    config: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if static else "dynamic",
    }  # fmt: skip
    if layout == "block":
        return Eight({**config, "weight_block_size": [128, 128]}, "e4m3", layout, "weight_scale_inv")
    return Eight(config, "e4m3", layout, "weight_scale", axes=0 if layout == "tensor" else 1, static=static)


def smooth_quant(kind: str = "int8") -> Eight:
    return Eight({"quant_method": "smooth_quant", "quant_dtype": kind}, kind, "channel", "scale")


def eight(kind: str, layout: str, *, static: bool = False) -> Eight:
    shared = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    inputs = {
        "strategy": {"block": "group"}.get(layout, "tensor" if static else "token"), "dynamic": not static,
        "group_size": 128 if layout == "block" else None,
    }  # fmt: skip
    weights = {"strategy": layout, "block_structure": [128, 128] if layout == "block" else None}
    group = {"targets": ["Linear"], "weights": {**shared, **weights}, "input_activations": {**shared, **inputs}}
    config = {
        "quant_method": "compressed-tensors", "format": f"{shared['type']}-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip
    return Eight(config, kind, layout, "weight_scale", axes=1 if layout == "tensor" else 2, static=static)


def is_projection(name: str) -> bool:
    """Whether a tensor of a checkpoint is a weight that is quantized."""
    return name.endswith("proj.weight") or (
        ".layers." in name and name.endswith(("wqkv.weight", "wo.weight", "put_linear.weight"))
    )


def write(source: Path, folder: Path, fmt: Format | Eight, quantized: Callable[[str], bool] = is_projection) -> Path:
    """A quantized copy of the checkpoint in `source`, in `folder`, and below it "plain": what the files say, by
    numpy, as a plain checkpoint."""
    shutil.copytree(source, folder)
    shutil.copytree(source, folder / "plain")
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not quantized(name):
            tensors[name] = plain[name] = tensor
            continue
        module = name.removesuffix(".weight")
        # Projections of one input share their groups, as their Hessians do.
        seed = sum(map(ord, module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_")))
        # All experts may be in one tensor.
        each_stored = [fmt.quantize(one.double().numpy(), seed) for one in tensor.view(-1, *tensor.shape[-2:])]
        decoded = [torch.from_numpy(fmt.decode(fmt, stored)) for stored in each_stored]  # type: ignore[arg-type]
        stored = {key: np.stack([one[key] for one in each_stored]) for key in each_stored[0]}
        if tensor.ndim == 2:
            stored = each_stored[0]
        if f"{module}.bias" in load_file(source / "model.safetensors"):
            stored.pop("bias", None)
        plain[name] = torch.stack(decoded).view_as(tensor).float().contiguous()
        for key, each in stored.items():
            tensor = torch.from_numpy(np.array(each, order="C"))
            tensors[f"{module}.{key}"] = tensor.view(torch.float8_e4m3fn) if each.dtype == np.uint8 else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, fmt.config)
    return folder


def write_config(folder: Path, quantization: Mapping[str, Any] | None) -> None:
    """Replace the quantization_config of a checkpoint."""
    file = folder / "config.json"
    fields = {**json.loads(file.read_text(encoding="utf-8")), "quantization_config": quantization}
    file.write_text(json.dumps(fields), encoding="utf-8")


def change(folder: Path, changes: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    changes(tensors)
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
