"""ShardFile: a safetensors file that is written tensor by tensor, so that memory never holds more than one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, short

__all__ = ["DTYPE_NAMES", "ShardFile"]

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that can be written, with their names in the format."""

_HEADER_BYTES = 2**18
"""Bytes of a file that are kept free for its header, some 2000 tensors. Spaces fill what it does not need."""
_ALIGNMENT = 8
"""Readers map a tensor into memory only if it begins at a multiple of its element size, and the format has no gaps."""


class ShardFile:
    """A file being written, as a context, whose end writes the header.

    Tensors whose bytes are not a multiple of `_ALIGNMENT` wait in memory for the end, where they come in the order of
    their element sizes.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = path.open("wb")
        self._file.seek(8 + _HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(msgspec.json.encode(self._header))
        """Maximum size of the header of all tensors so far."""
        self._waiting: dict[str, Tensor] = {}
        self.names: list[str] = []
        """Names of the tensors so far."""
        self.num_bytes = 0
        """Bytes of the tensors so far."""

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Return whether the header has room for a tensor."""
        return self._header_bytes + _most_bytes(name, tensor) <= _HEADER_BYTES

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of any strides, on any device. Raises OSError, and InvalidCheckpoint if the header has no room
        for it."""
        if not self.has_room(name, tensor):
            raise InvalidCheckpoint(f"The header of a file has no room for the tensor {short(name)}.")
        self._header_bytes += _most_bytes(name, tensor)
        self.names.append(name)
        self.num_bytes += tensor.nbytes
        if tensor.nbytes % _ALIGNMENT:
            self._waiting[name] = tensor.detach().clone()
        else:
            self._write(name, tensor.detach())

    def _write(self, name: str, tensor: Tensor) -> None:
        start = self._file.tell() - 8 - _HEADER_BYTES
        shape, place = list(tensor.shape), [start, start + tensor.nbytes]
        self._header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": place}
        self._file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                for name, tensor in sorted(self._waiting.items(), key=lambda each: -each[1].itemsize):
                    self._write(name, tensor)
                self._file.seek(0)
                header = msgspec.json.encode(self._header).ljust(_HEADER_BYTES)
                self._file.write(len(header).to_bytes(8, "little") + header)


def _most_bytes(name: str, tensor: Tensor) -> int:
    """Return the maximum size of a tensor's entry in the header: two offsets, the sizes and the words around them."""
    return len(msgspec.json.encode(name)) + 20 * (tensor.ndim + 2) + 64
