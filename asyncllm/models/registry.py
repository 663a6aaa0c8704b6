"""Architectures by the name that config.json gives them. Every module of `asyncllm.models` is scanned for families."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

import asyncllm.models
from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.layers.layer import settle
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.weights import load

__all__ = ["families", "open_model", "read_config", "register"]

Family = TypeVar("Family", bound=type[DecoderLM])

_FAMILIES: dict[str, type[DecoderLM]] = {}


def register(*architectures: str) -> Callable[[Family], Family]:
    """Class decorator: this family serves checkpoints whose config.json names one of `architectures`."""

    def enter(family: Family) -> Family:
        for architecture in architectures:
            other = _FAMILIES.setdefault(architecture, family)
            if other is not family:
                raise ValueError(f"{architecture} is registered by {other.__module__} and {family.__module__}")
        return family

    return enter


@cache
def families() -> Mapping[str, type[DecoderLM]]:
    """Architecture name -> family, of every module in `asyncllm.models`."""
    for module in pkgutil.iter_modules(asyncllm.models.__path__):
        importlib.import_module(f"asyncllm.models.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def read_config(
    path: Path,
    *,
    session_len: int | None = None,
    rope_scaling_factor: float = 0.0,
    hf_overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """What `open_model` would build from the folder `path`, without its weights. Raises the same errors."""
    return _configure(path, session_len, rope_scaling_factor, hf_overrides)[1]


def open_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    session_len: int | None = None,
    rope_scaling_factor: float = 0.0,
    hf_overrides: Mapping[str, Any] | None = None,
) -> DecoderLM:
    """Build the model of folder `path` and fill it from the folder's safetensors files.

    A longrope model takes its long divisors iff session_len exceeds the original context. rope_scaling_factor > 0 asks
    for dynamic NTK scaling by that factor. hf_overrides replaces entries of config.json.

    Raises:
        InvalidCheckpoint: a file is missing, malformed or inconsistent with the others.
        UnsupportedModel: the architecture or one of its settings is not implemented.
    """
    family, config = _configure(path, session_len, rope_scaling_factor, hf_overrides)
    checkpoint = Checkpoint.open(path)
    with torch.device("meta"):
        model = family(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    if num_parameters > 2 * stored:
        # Such a file cannot load, and may ask for more memory than there is; load() names what differs in closer calls.
        raise InvalidCheckpoint(
            f"{path}: config.json describes {num_parameters:,} parameters, but the safetensors files hold {stored:,} "
            f"numbers. Check that config.json belongs to these weights and that no shard is missing."
        )
    model.allocate(dtype, device)
    load(model, checkpoint, model.weight_map)
    model.config = msgspec.structs.replace(config, num_parameters=num_parameters)
    model.eval()
    settle(model)
    return model


def _configure(
    path: Path, session_len: int | None, rope_scaling_factor: float, hf_overrides: Mapping[str, Any] | None
) -> tuple[type[DecoderLM], ModelConfig]:
    hf = HFConfig.open(path, overrides=hf_overrides, session_len=session_len, rope_scaling_factor=rope_scaling_factor)
    names = hf.fields.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidCheckpoint(
            f"{hf.source}: architectures must be a list of names, for example ['LlamaForCausalLM']. Correct the file."
        )
    for name in names:
        if name in families():
            return families()[name], families()[name].configure(hf, name)
    remote = "Its own code (auto_map) is never run. " if hf.fields.get("auto_map") else ""
    raise UnsupportedModel(
        f"{hf.source}: architectures = {names} is not implemented. {remote}Implemented: {', '.join(families())}."
    )
