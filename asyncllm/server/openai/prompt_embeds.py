"""The `prompt_embeds` of completions: tensors as torch.save writes them, in base64, as in vLLM. Nothing that a client's
pickle names is imported or called, except what stands for a tensor here."""

from __future__ import annotations

import base64
import io
import math
import pickle
import zipfile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncllm.server.http.errors import ApiError
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.server.service import Service

__all__ = ["prompt_embeds_of"]

BYTES_PER_CHARACTER = 64
"""Bytes of base64 that take as long to decode as a character of text takes to encode."""

STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": "<u2"}
"""Classes of torch -> dtype of their bytes; numpy has no bfloat16, whose bits are the upper half of a float32's."""
BFLOAT16 = STORAGES["BFloat16Storage"]


async def prompt_embeds_of(service: Service, body: CompletionRequest) -> list[NDArray[Any]]:
    """Return the tensors [tokens, hidden] of a request, decoded in a thread if they are large. Raises ApiError."""
    if body.prompt_embeds is None:
        return []
    if not service.engine.limits.takes_embeddings:
        raise _refused("The server was not started with --enable-prompt-embeds.", "prompt_embeds")
    about_tokens = {
        "echo": body.echo,
        "suffix": body.suffix,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    for name, is_asked in about_tokens.items():
        if is_asked:
            raise _refused(f"{name} is about the tokens of a prompt, and prompt_embeds have none.", name)
    sent = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    most = service.config.max_prompts
    if not 1 <= len(sent) <= most:
        raise _invalid(f"prompt_embeds holds {len(sent)} entries. Send 1 to {most} in a request.")
    hidden_size = service.engine.limits.hidden_size
    return await service.engine.offload(
        lambda: [_decoded(text, f"prompt_embeds[{index}]", hidden_size) for index, text in enumerate(sent)],
        sum(map(len, sent)) // BYTES_PER_CHARACTER,
    )


def _refused(why: str, param: str) -> ApiError:
    return ApiError(400, f"{why} Leave it out.", code="unsupported_feature", param=param)


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="prompt_embeds")


def _decoded(text: str, name: str, hidden_size: int) -> NDArray[Any]:
    try:
        values = _tensor(base64.b64decode(text, validate=True))
    except Exception as error:
        # A damaged or hostile pickle can raise anything.
        raise _invalid(
            f"{name} is no tensor [tokens, hidden] in base64, as torch.save writes it ({type(error).__name__}: "
            f"{str(error)[:200]}). Send one of float32, float16, bfloat16 or float64, contiguous and on the CPU."
        ) from None
    if values.shape[1] != hidden_size or not values.size or not np.isfinite(values).all():
        raise _invalid(
            f"{name} has the shape {list(values.shape)}, or numbers that are not finite. The model's embeddings are "
            f"[tokens, {hidden_size}]."
        )
    return values


class _Storage(NamedTuple):
    dtype: str
    values: bytes


class _View(NamedTuple):
    """The arguments of torch's function that makes a tensor of a storage."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


def _tensor(data: bytes) -> NDArray[Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [entry.filename for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        folder = found[0].removesuffix("data.pkl")
        view = _Unpickler(archive, folder).load()
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its bytes are not little-endian")
    if not isinstance(view, _View) or not isinstance(view.storage, _Storage):
        raise ValueError("it holds something else than one tensor")
    rows, columns = view.shape
    if rows > 1 and view.strides != (columns, 1):
        raise ValueError("it is not contiguous")
    dtype = np.dtype(view.storage.dtype)
    flat = np.frombuffer(view.storage.values, dtype, math.prod(view.shape), view.offset * dtype.itemsize)
    if view.storage.dtype == BFLOAT16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(rows, columns)


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(_stored(archive, f"{folder}data.pkl")))
        self._archive = archive
        self._folder = folder
        self._has_read = False

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if (module, name) == ("collections", "OrderedDict"):
            return _no_hooks
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module[:64]}.{name[:64]}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        # A second one could be the first again, and again.
        if self._has_read or dtype not in STORAGES.values():
            raise pickle.UnpicklingError("it holds something else than one tensor")
        self._has_read = True
        return _Storage(dtype, _stored(self._archive, f"{self._folder}data/{key}"))


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
    return _View(storage, offset, shape, strides)


def _no_hooks(*_: Any) -> None:
    """Stand for a tensor's hooks, of which a saved one has none."""


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of the archive. Raises ValueError if it is compressed, and could be far larger than its archive."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its archive is compressed")
    return archive.read(entry)
