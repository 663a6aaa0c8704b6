"""Checkpoint: the safetensors files of a model folder, validated before any tensor data is used.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data that
the offsets count from (https://huggingface.co/docs/safetensors). Sharded checkpoints add `model.safetensors.index.json`
with {"weight_map": {tensor name: file name}}; without it, all files are shards. Nothing here opens a pickle.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, ModelNotFound, short
from asyncllm.locate import GGUF_ADVICE, MISTRAL_ADVICE

__all__ = ["INDEX_NAME", "WEIGHTS_NAME", "Checkpoint", "TensorEntry", "read_header", "unreadable"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself; headers of real shards are below 5 MB."""

MAX_DIMENSION = 2**63 - 1
MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a torch tensor."""

_NUMBERED = re.compile(r".*?\d+(?P<shards>-of-(?P<count>\d+)\.safetensors)")
"""Name of one of several files, such as model-00001-of-00003.safetensors."""

COMPARED_ROWS = 4096
"""Number of rows of two tables compared at once: some 100 MB of float32 for the widest models."""

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor is stored. `start` and `end` are bytes from the end of the header; `dtype` is the format's
    name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    data_start: int
    """Position in the file at which the header ends."""
    start: int
    end: int
    stride: int = 0
    """For some columns of a matrix, the bytes from one of their rows to the next; otherwise the rows are contiguous."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def part(self, axis: int, taken: slice) -> TensorEntry:
        """Return the entry of some rows (axis 0) or columns (1) of this matrix, or of some numbers of a vector."""
        shape = list(self.shape)
        row = (self.end - self.start) // shape[0]
        shape[axis] = len(range(shape[axis])[taken])
        if axis == 0:
            start = self.start + min(taken.start, self.shape[0]) * row
            return replace(self, shape=tuple(shape), start=start, end=start + shape[0] * row)
        start = self.start + taken.start * row // self.shape[1]
        return replace(self, shape=tuple(shape), start=start, stride=row)


class Checkpoint:
    """The tensors of a model folder: one `model.safetensors`, or the shards of `model.safetensors.index.json`, or else
    all safetensors files but Mistral's own (`consolidated*`).

    The first of these that a folder has is read, as the hub's own readers do. Files are open only inside `read`.
    """

    def __init__(self, folder: Path, entries: Iterable[TensorEntry]) -> None:
        self.folder = folder
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType({entry.name: entry for entry in entries})
        self.expanded: Set[str] = frozenset()
        """Names of the tensors that are stored in another form."""

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Validate every header in `folder` and list its tensors.

        Raises:
            ModelNotFound: `folder` is not a folder.
            InvalidCheckpoint: no safetensors weights, or a file that is missing, truncated or inconsistent.
        """
        if not folder.is_dir():
            raise ModelNotFound(f"{folder} is not a folder. Give the folder that holds config.json and the weights.")
        # A link without its target, as left by an interrupted download, must be reported rather than passed over.
        if os.path.lexists(folder / WEIGHTS_NAME):
            return cls(folder, read_header(folder / WEIGHTS_NAME).values())
        if os.path.lexists(folder / INDEX_NAME):
            return cls(folder, _read_shards(folder))
        loose = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
        if loose:
            return cls(folder, _read_loose(loose))
        _refuse_folder(folder)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors, without headers."""
        return sum(entry.end - entry.start for entry in self.tensors.values())

    def read(self, names: Iterable[str] | None = None) -> Generator[tuple[str, Tensor], None, None]:
        """Yield (name, CPU tensor) file by file, in data order, for `names` or for all tensors.

        A tensor is a view of the memory-mapped file: copy it if it must outlive the file, and never write to it.

        Raises:
            InvalidCheckpoint: a file has vanished or changed since it was validated.
        """
        entries = self.tensors.values() if names is None else [self.tensors[name] for name in names]
        by_file: dict[Path, list[TensorEntry]] = {}
        for entry in entries:
            by_file.setdefault(entry.file, []).append(entry)
        for file, wanted in by_file.items():
            wanted.sort(key=lambda entry: entry.start)
            try:
                with safe_open(file, framework="pt") as opened:
                    for entry in wanted:
                        yield entry.name, opened.get_tensor(entry.name)
            except (OSError, SafetensorError) as error:
                raise unreadable(file, error) from error

    def expand(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of those of `names` that are expanded, made on the device. Raises InvalidCheckpoint, as
        `read` does, and for values that cannot be expanded."""
        return iter(())

    def equal(self, first: str, second: str) -> bool:
        """Return whether two matrices are equal. They are read by rows up to the first difference.

        Raises InvalidCheckpoint like `read`.
        """
        entries = [self.tensors[name] for name in (first, second)]
        if entries[0].shape != entries[1].shape or len(entries[0].shape) != 2:
            return False
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(safe_open(entry.file, framework="pt")) for entry in entries]
                left, right = (file.get_slice(entry.name) for file, entry in zip(files, entries, strict=True))
                starts = range(0, entries[0].shape[0], COMPARED_ROWS)
                return all(
                    left[start : start + COMPARED_ROWS].float().equal(right[start : start + COMPARED_ROWS].float())
                    for start in starts
                )
        except (OSError, SafetensorError) as error:
            raise unreadable(entries[0].file, error) from error


def unreadable(file: Path, why: object) -> InvalidCheckpoint:
    """Return the error for data that cannot be read although the header could."""
    return InvalidCheckpoint(
        f"{file} could not be read ({why}), although its header was valid. "
        f"Check that nothing rewrites the folder while it is loaded."
    )


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Validate the header of one safetensors file and return its tensors by name.

    Checked: header length against the file size, JSON without duplicate keys, known dtypes, plausible shapes, and data
    that the tensors cover exactly once, from first byte to last.

    Raises InvalidCheckpoint.
    """
    try:
        size = file.stat().st_size
        if not file.is_file():
            _refuse(file, "cannot be read: it is not a file")
        with file.open("rb") as opened:
            prefix = opened.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix.startswith(b"version "):
                _refuse(file, "is a Git LFS pointer and not the weights", "Run `git lfs pull` in its folder.")
            if len(prefix) < 8:
                _refuse(file, f"has {size} bytes, and a safetensors file begins with an 8-byte header length")
            if length > size - 8:
                _refuse(file, f"is truncated: the header takes {length} bytes, and {size - 8} follow its length")
            if length > MAX_HEADER_BYTES:
                _refuse(file, f"has a header of {length} bytes, and the format allows {MAX_HEADER_BYTES}")
            text = opened.read(length)
    except OSError as error:
        raise InvalidCheckpoint(
            f"{file} cannot be read: {error.strerror or error}. Check its permissions and the disk."
        ) from error
    header = _parse_json(file, text, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, "has a __metadata__ that is not a mapping of strings")
    entries = {name: _parse_entry(file, name, fields, 8 + length) for name, fields in header.items()}
    _check_layout(file, entries, data_size=size - 8 - length)
    return entries


def _refuse(file: Path, what: str, instead: str = "Download the file again.") -> NoReturn:
    raise InvalidCheckpoint(f"{file} {what}. {instead}")


def _parse_json(file: Path, text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            _refuse(file, f"names {short(twice)} twice in its {what}")
        return mapping

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{file}: the {what} is not JSON ({error}). Download the file again.") from None
    if not isinstance(parsed, dict):
        _refuse(file, f"has a {what} that is a JSON {type(parsed).__name__} instead of an object")
    return parsed


def _parse_entry(file: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    where = f"declares tensor {short(name)}"
    if not name:
        _refuse(file, f"{where} without a name")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        _refuse(file, f"{where} without exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        _refuse(file, f"{where} with the unknown dtype {short(dtype)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in shape):
        _refuse(file, f"{where} with shape {short(shape)}, which is not a list of sizes between 0 and 2^63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        _refuse(file, f"{where} with data_offsets {short(offsets)}, which are not two integers")
    if len(shape) > MAX_DIMENSIONS:
        _refuse(file, f"{where} with {len(shape)} dimensions, and {MAX_DIMENSIONS} are the most there can be")
    start, end = offsets
    if not 0 <= start <= end:
        _refuse(file, f"{where} with data_offsets {short(offsets)}, which do not run forward from 0")
    needed = math.prod(shape) * bits
    if needed != (end - start) * 8:
        _refuse(
            file,
            f"{where} as {dtype} {short(shape)}, which takes {short(needed / 8 if needed % 8 else needed // 8)} bytes, "
            f"but gives it {short(end - start)} bytes",
        )
    return TensorEntry(name, dtype, tuple(shape), file, data_start, start, end)


def _check_layout(file: Path, entries: Mapping[str, TensorEntry], data_size: int) -> None:
    previous: TensorEntry | None = None
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.end > data_size:
            _refuse(
                file,
                f"is truncated: tensor {short(entry.name)} ends at byte {short(entry.end)} of the data, "
                f"and there are {data_size}",
            )
        if entry.start < position and previous is not None:
            _refuse(file, f"declares tensors {short(previous.name)} and {short(entry.name)} on overlapping bytes")
        if entry.start > position:
            _refuse(file, f"has {entry.start - position} bytes before tensor {short(entry.name)} that no tensor owns")
        previous, position = entry, entry.end
    if position < data_size:
        _refuse(file, f"has {data_size - position} bytes after its last tensor that no tensor owns")


def _read_shards(folder: Path) -> list[TensorEntry]:
    index = folder / INDEX_NAME
    try:
        size = index.stat().st_size
        if not index.is_file():
            _refuse(index, "cannot be read: it is not a file")
        if size > MAX_HEADER_BYTES:
            _refuse(index, f"is larger than {MAX_HEADER_BYTES} bytes")
        text = index.read_bytes()
    except OSError as error:
        raise InvalidCheckpoint(f"{index} cannot be read: {error.strerror or error}. Check its permissions.") from error
    weight_map = _parse_json(index, text, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(index, "has no weight_map of tensor names to file names")
    shards: dict[str, dict[str, TensorEntry]] = {}
    for name, shard in weight_map.items():
        # A shard is a plain file name: an index from the hub must not reach files outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            _refuse(index, f"puts tensor {short(name)} in {short(shard)}, which is not the name of a file beside it")
        if not shard.endswith(".safetensors"):
            _refuse(index, f"puts tensor {short(name)} in {short(shard)}, which is not a .safetensors file")
        if shard not in shards:
            if not (folder / shard).is_file():
                _refuse(
                    index,
                    f"puts tensor {short(name)} in {short(shard)}, and that file is missing",
                    f"Download {short(shard)} into {folder}.",
                )
            shards[shard] = read_header(folder / shard)
    entries = _joined(shards.values())
    for name, entry in entries.items():
        # An index may omit tensors that its shard holds, such as rotary buffers, but not put them elsewhere.
        if weight_map.get(name, entry.file.name) != entry.file.name:
            _refuse(
                entry.file,
                f"holds tensor {short(name)}, which {INDEX_NAME} puts in {short(weight_map.get(name))}",
                "Download the index and the shards again, from the same revision.",
            )
    for name, shard in weight_map.items():
        if name not in entries:
            _refuse(
                index,
                f"puts tensor {short(name)} in {short(shard)}, which does not hold it",
                "Download the index and the shards again, from the same revision.",
            )
    return list(entries.values())


def _read_loose(files: Sequence[Path]) -> list[TensorEntry]:
    """Return the tensors of all files. Raises InvalidCheckpoint, also if a file's name says that others are missing."""
    numbered = {file: match for file in files if (match := _NUMBERED.fullmatch(file.name))}
    present = Counter(match["shards"] for match in numbered.values())
    for file, match in numbered.items():
        if present[match["shards"]] < int(match["count"]):
            _refuse(
                file,
                f"is one of {int(match['count'])} files by its name, and {present[match['shards']]} are here",
                "Download the others.",
            )
    return list(_joined(map(read_header, files)).values())


def _joined(shards: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for tensors in shards:
        for name, entry in tensors.items():
            other = entries.setdefault(name, entry)
            if other is not entry:
                _refuse(
                    entry.file,
                    f"holds tensor {short(name)}, which {other.file.name} holds too",
                    f"Remove the file that does not belong to the model, or download all again with {INDEX_NAME}.",
                )
    return entries


def _refuse_folder(folder: Path) -> NoReturn:
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if name.endswith(FOREIGN_SUFFIXES) and name != "training_args.bin"]
    whole = [name for name in names if name.endswith(".safetensors")]
    if foreign and all(name.endswith(".gguf") for name in foreign):
        raise InvalidCheckpoint(f"{folder} holds its weights as {', '.join(foreign[:5])}. {GGUF_ADVICE}")
    if foreign:
        raise InvalidCheckpoint(
            f"{folder} holds its weights as {', '.join(foreign[:5])}, and only safetensors files are loaded, because "
            f"they cannot run code. Turn .bin files into safetensors with `asyncllm convert {folder}`."
        )
    if whole:
        raise InvalidCheckpoint(f"{folder} holds its weights as {', '.join(whole[:5])}. {MISTRAL_ADVICE}")
    raise InvalidCheckpoint(
        f"{folder} holds no weights: no {WEIGHTS_NAME} and no other safetensors file. Download the model's; a model "
        f"that comes only as .bin files is turned into safetensors with `asyncllm convert FOLDER`."
    )
