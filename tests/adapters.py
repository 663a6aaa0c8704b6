"""PEFT adapters of random numbers, written as the hub has them, and the weights that they come to when merged."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["delta", "merge", "shapes_of", "write_adapter"]

PREFIX = "base_model.model."


def shapes_of(model: nn.Module, *ends: str) -> dict[str, tuple[int, int]]:
    """Module name -> (out, in) of the linear layers of a transformers model, or of those whose names end so."""
    shapes = {}
    for name, module in model.named_modules():
        if not ends or name.endswith(ends):
            if type(module).__name__ == "Conv1D":
                shapes[name] = tuple(module.weight.t().shape)
            elif isinstance(module, nn.Linear):
                shapes[name] = tuple(module.weight.shape)
    return shapes


def _factors(module: str, shape: tuple[int, int], rank: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {module}".encode()))
    a, b = torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator)
    return a / math.sqrt(shape[1]), b / math.sqrt(rank)


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    pickled: bool = False,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for these modules. `ranks`: of some modules, whose names they are, another rank."""
    tensors = {}
    for module, shape in shapes.items():
        a, b = _factors(module, shape, (ranks or {}).get(module, rank), seed)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype).contiguous()
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
        "fan_in_fan_out": False,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": {},
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    if pickled:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def delta(module: str, shape: tuple[int, int], *, scale: float = 2.0, rank: int = 4, seed: int = 0) -> Tensor:
    """What the adapter of these arguments adds to a module's weight [out, in]; `scale` is alpha / r."""
    a, b = _factors(module, shape, rank, seed)
    return scale * b @ a


@torch.no_grad()
def merge(model: nn.Module, shapes: Mapping[str, tuple[int, int]], **adapter: Any) -> nn.Module:
    """Add an adapter's products to the weights of a transformers model."""
    for module, shape in shapes.items():
        owner, added = model.get_submodule(module), delta(module, shape, **adapter)
        owner.weight += added.t() if type(owner).__name__ == "Conv1D" else added
    return model
