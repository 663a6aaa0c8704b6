"""A checkpoint folder that appears complete or not at all, and the files in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.models.loading.checkpoint import INDEX_NAME, WEIGHTS_NAME
from asyncllm.models.loading.shard_file import ShardFile
from asyncllm.text.sentence_transformers import pooling_folder

__all__ = ["MAX_SHARD_BYTES", "check_free", "copy_companions", "output_folder", "write_shards"]

MAX_SHARD_BYTES = 5_000_000_000

COPIED = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)


def check_free(destination: Path, param: str, *, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that does not exist yet, is empty, or may be overwritten.

    Raises InvalidParameter, which names `param`.
    """
    destination = Path(os.path.abspath(destination))
    if destination.exists() and (not destination.is_dir() or (any(destination.iterdir()) and not overwrite)):
        raise InvalidParameter(
            f"{destination} exists already and would be overwritten. Give another destination, or remove it.", param
        )
    return destination


@contextmanager
def output_folder(destination: Path, needed: int) -> Iterator[Path]:
    """Yield an empty folder next to `destination`. It replaces `destination` and its contents if the block ends without
    an error; otherwise it is removed. `needed`: approximate number of bytes to be written.

    Raises ModelError if it cannot be written.
    """
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ModelError(f"{destination} cannot be written ({error}). Give another destination.") from error
    try:
        free = shutil.disk_usage(partial).free
        if needed > free:
            raise ModelError(f"{destination.parent} has {free} bytes free, and the copy takes {needed}. Make room.")
        yield partial
        _take_place(partial, destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise ModelError(f"{destination} could not be written ({error}). The partial copy is removed.") from error
        raise


def _take_place(partial: Path, destination: Path) -> None:
    replaced = destination.with_name(f".{destination.name}.{os.getpid()}.replaced")
    if destination.exists():
        destination.rename(replaced)
    partial.rename(destination)
    shutil.rmtree(replaced, ignore_errors=True)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer and template files, and an embedding model's settings of pooling, but no code."""
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".index.json"):
                copy = folder / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
    pooling = pooling_folder(source)
    if pooling and (source / pooling / "config.json").is_file():
        (folder / pooling).mkdir(exist_ok=True)
        shutil.copyfile(source / pooling / "config.json", folder / pooling / "config.json")


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the tensors in order, one after the other, in files of at most `max_shard_bytes`, and an index if there are
    several files."""
    shards: list[list[str]] = []
    total_bytes = 0
    with ExitStack() as stack:
        shard = stack.enter_context(ShardFile(folder / "0.shard"))
        for name, tensor in tensors:
            full = shard.num_bytes + tensor.nbytes > max_shard_bytes or not shard.has_room(name, tensor)
            if shard.names and full:
                stack.close()
                shards.append(shard.names)
                shard = stack.enter_context(ShardFile(folder / f"{len(shards)}.shard"))
            shard.add(name, tensor)
            total_bytes += tensor.nbytes
            del tensor
    shards.append(shard.names)
    if len(shards) == 1:
        (folder / "0.shard").rename(folder / WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.shard").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
