"""What every agent does first: choose device and type, open the model, and say what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from asyncllm.batch import Limits, StartTimes
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.kernels.cache import GPU_BLOCK_MULTIPLE
from asyncllm.models.config import ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import open_model, read_config

__all__ = ["OpenedModel", "check_block_size", "choose_device"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _ModelOptions(TypedDict):
    session_len: int | None
    rope_scaling_factor: float
    hf_overrides: dict[str, Any] | None


class OpenedModel(NamedTuple):
    """A filled model, where it lies, and how long its sequences may be."""

    model: DecoderLM
    device: torch.device
    dtype: torch.dtype
    """Of weights, activations and KV."""
    max_position: int
    """Positions that a session may use."""
    path: Path

    @staticmethod
    def open(config: EngineConfig, path: Path, *, times: StartTimes, model: DecoderLM | None = None) -> OpenedModel:
        """Load the checkpoint in the folder `path`, unless its `model` is given. `times` gets what it took.

        Raises ModelError when the checkpoint cannot be loaded, and InvalidParameter when `session_len` asks for more
        positions than the model has, or the device takes no blocks of this size.
        """
        asked: _ModelOptions = {
            "session_len": config.session_len,
            "rope_scaling_factor": config.rope_scaling_factor,
            "hf_overrides": config.hf_overrides,
        }
        device = choose_device(config)
        check_block_size(config, device)
        if device.type == "cuda":
            # The device's context, which the first allocation makes.
            torch.empty(1, device=device)
        times.lap("device")
        model_config = read_config(path, **asked) if model is None else model.config
        max_position = _max_position(config, model_config)
        dtype = _dtype(config, model_config, device)
        if model is None:
            model = open_model(path, dtype=dtype, device=device, **asked)
        times.lap("load")
        return OpenedModel(model, device, dtype, max_position, path)

    def limits(self, num_blocks: int, block_size: int, num_slots: int, **more: Any) -> Limits:
        """What the engine has to know; `more` are further fields of `Limits`."""
        config = self.model.config
        return Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_position=self.max_position,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_slots=num_slots,
            dynamic_rope_from=config.rope.original_max_position if config.dynamic_rope else None,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            architecture=config.architecture,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            model_path=str(self.path),
            **more,
        )


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `device_type` asks for. Raises InvalidParameter when it is not there."""
    available = torch.cuda.is_available()
    if config.device_type == "cuda" and not available:
        raise InvalidParameter(
            "device_type is 'cuda', but torch finds no CUDA device here. Use device_type='cpu' or 'auto'.",
            "device_type",
        )
    return torch.device("cuda" if available and config.device_type != "cpu" else "cpu")


def check_block_size(config: EngineConfig, device: torch.device) -> None:
    """Raise InvalidParameter for blocks that attention on this device cannot read (`kernels.plan_decode_attention`)."""
    if device.type == "cuda" and config.tokens_per_block % GPU_BLOCK_MULTIPLE:
        raise InvalidParameter(
            f"block_size is {config.tokens_per_block}, and attention on a GPU reads blocks of a multiple of "
            f"{GPU_BLOCK_MULTIPLE} tokens. Leave it at 64, or round it up.",
            "block_size",
        )


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` means float32 on a CPU and the checkpoint's own type on a GPU."""
    name = config.dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else _DTYPES[model.dtype]
    return _DTYPES[name]


def _max_position(config: EngineConfig, model: ModelConfig) -> int:
    """`session_len` if given, else all positions that the model has."""
    limit = model.max_position
    if config.session_len is None:
        return limit
    if config.session_len > limit:
        raise InvalidParameter(
            f"session_len is {config.session_len}, but the model has {limit} positions after rotary scaling. "
            f"Lower session_len, or extend the model with rope_scaling_factor.",
            "session_len",
        )
    return config.session_len
