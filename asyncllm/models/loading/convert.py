"""Converts PyTorch pickles to safetensors, without running the code that a pickle may contain.

`torch.load(weights_only=True)` is the only reader of pickles in the package, and only this file calls it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, InvalidParameter, ModelNotFound, short
from asyncllm.models.loading.checkpoint import INDEX_NAME, WEIGHTS_NAME, Checkpoint
from asyncllm.models.loading.output_folder import (
    MAX_SHARD_BYTES,
    check_free,
    copy_companions,
    output_folder,
    write_shards,
)
from asyncllm.models.loading.shard_file import DTYPE_NAMES

__all__ = ["ConvertReport", "convert", "load_pickle"]

PICKLE_NAME = "pytorch_model.bin"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"

HEAD_NAMES = ("lm_head.weight", "output.weight", "output_layer.weight", "embed_out.weight")
"""Endings of the names of output heads, which a checkpoint with tied embeddings need not store."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of `convert`."""

    destination: Path
    files: tuple[str, ...]
    """The weight files, in order."""
    num_tensors: int
    num_bytes: int
    """Number of bytes of all tensors."""
    dropped: tuple[str, ...]
    """Tied copies of the embedding that were omitted."""


def convert(source: Path, destination: Path | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> ConvertReport:
    """Write the model folder `source`, whose weights are `.bin` files, as a model folder with safetensors.

    Tensor names, dtypes and values are unchanged. `destination` appears complete or not at all: it is written next to
    its final path and renamed. Configuration, tokenizer and template files are copied; code is not.

    Args:
        source: folder with config.json and `pytorch_model.bin`, or shards with `pytorch_model.bin.index.json`.
        destination: a folder that does not exist, or is empty; None is `source` with "-safetensors" appended.
        max_shard_bytes: most bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        ModelNotFound: `source` is not a folder.
        InvalidParameter: `destination` is taken, or `max_shard_bytes` is not positive.
        InvalidCheckpoint: no config.json, no `.bin` weights, a file that is damaged or holds more than plain tensors.
        ModelError: `destination` cannot be written, or the disk is full.
    """
    source = Path(source)
    if not source.is_dir():
        raise ModelNotFound(
            f"{source} is not a folder. Give the folder that holds config.json and the .bin files. LMDeploy's step of "
            f"this name is not needed: a model is loaded as the hub has it."
        )
    if max_shard_bytes <= 0:
        raise InvalidParameter(f"max_shard_bytes is {max_shard_bytes}, and must be positive.", "max_shard_bytes")
    tied = _read_json(source / "config.json").get("tie_word_embeddings") is True
    pickles = _pickles(source)
    if destination is None:
        destination = Path(os.path.abspath(source) + "-safetensors")
    destination = check_free(destination, "destination")
    dropped: list[str] = []
    with output_folder(destination, sum(file.stat().st_size for file in pickles)) as partial:
        write_shards(_tensors(pickles, tied, dropped), partial, max_shard_bytes)
        copy_companions(source, partial)
        written = Checkpoint.open(partial)
    files = tuple(sorted({entry.file.name for entry in written.tensors.values()}))
    return ConvertReport(destination, files, len(written.tensors), written.num_bytes, tuple(dropped))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{file.parent} has no {file.name}. Give the folder of a whole model.") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidCheckpoint(f"{file} is not a JSON object ({error}). Download the file again.") from error


def _pickles(source: Path) -> list[Path]:
    """Return the files to read, in the order of the index."""
    if (source / WEIGHTS_NAME).exists() or (source / INDEX_NAME).exists():
        raise InvalidCheckpoint(f"{source} holds safetensors already. It can be loaded as it is.")
    if (source / PICKLE_NAME).is_file():
        return [source / PICKLE_NAME]
    index = source / PICKLE_INDEX_NAME
    if not index.exists():
        raise InvalidCheckpoint(
            f"{source} holds neither {PICKLE_NAME} nor {PICKLE_INDEX_NAME}. Only PyTorch .bin weights in the hub's "
            f"layout can be converted."
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpoint(f"{index} has no weight_map of tensor names to file names. Download the file again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise InvalidCheckpoint(
                f"{index} puts tensor {short(name)} in {short(shard)}, which is not the name of a file beside it."
            )
        if not (source / shard).is_file():
            raise InvalidCheckpoint(
                f"{index} puts tensor {short(name)} in {short(shard)}, and that file is missing. Download it."
            )
    return [source / shard for shard in dict.fromkeys(weight_map.values())]


def _tensors(pickles: list[Path], tied: bool, dropped: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, tensor), one pickle at a time, except heads that repeat the tied embedding, which are appended
    to `dropped`."""
    seen: dict[str, Path] = {}
    for file in pickles:
        state = load_pickle(file)
        groups: dict[tuple[Any, ...], int] = {}
        for tensor in state.values():
            groups[_identity(tensor)] = groups.get(_identity(tensor), 0) + 1
        for name, tensor in state.items():
            if name in seen:
                raise InvalidCheckpoint(f"{file} holds tensor {short(name)}, which {seen[name].name} holds too.")
            seen[name] = file
            if tied and name.endswith(HEAD_NAMES) and groups[_identity(tensor)] > 1:
                dropped.append(name)
            else:
                yield name, tensor


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride()


def load_pickle(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.bin` file. Raises InvalidCheckpoint if it is damaged or holds anything else."""
    try:
        # Only the zip layout can be memory-mapped; older files (before torch 1.6) are read whole.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file) or None)
    except Exception as error:
        # A damaged or hostile pickle can raise anything; weights_only calls nothing but the constructors of tensors.
        reason = str(error).strip().splitlines() or [""]
        raise InvalidCheckpoint(
            f"{file} was refused ({type(error).__name__}: {reason[0][:200]}): it is damaged, or it is a pickle that "
            f"needs code to run. Download it again, or have its author publish safetensors."
        ) from error
    if not isinstance(state, dict):
        raise InvalidCheckpoint(f"{file} holds a {type(state).__name__} instead of a mapping of names to tensors.")
    if not state:
        raise InvalidCheckpoint(f"{file} holds no tensor. Download the file again.")
    for name, tensor in state.items():
        if not isinstance(name, str) or not name:
            raise InvalidCheckpoint(f"{file} names a tensor {short(name)}, which is not a text.")
        plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
            raise InvalidCheckpoint(f"{file}: {short(name)} is not a plain tensor. Only plain tensors can be written.")
    return dict(state)
