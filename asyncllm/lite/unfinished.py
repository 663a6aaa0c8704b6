"""Store the layers of a checkpoint that are already quantized, so that an interrupted run can resume."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.output_folder import write_shards

__all__ = ["Unfinished", "unfinished"]

logger = logging.getLogger("asyncllm")

_FINGERPRINT, _STATE = "fingerprint", "state.safetensors"


class Unfinished:
    """A folder with the tensors of each finished layer and the inputs of the next one. Written by one holder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def finish(
        self, layer: int, tensors: Iterable[tuple[str, Tensor]], hidden: Iterable[Tensor], names: Mapping[str, object]
    ) -> None:
        """Store the tensors of a layer, then the hidden states after it, with `names`, which must be valid JSON.

        `hidden` is called after the last of the tensors. If the process is killed in between, the layer is not
        finished.
        """
        folder = self._layer(layer)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_shards(tensors, folder)
        kept = {str(number): each.contiguous() for number, each in enumerate(hidden)}
        partial = self.folder / f"{_STATE}.partial"
        save_file(kept, partial, metadata={"layers": str(layer + 1), "names": json.dumps(names)})
        partial.replace(self.folder / _STATE)

    def state(self) -> tuple[int, Sequence[Tensor], Mapping[str, list[str]]]:
        """Return the number of finished layers, and the hidden states and names after the last of them."""
        file = self.folder / _STATE
        if not file.exists():
            return 0, [], {}
        with safe_open(file, framework="pt") as opened:
            described = opened.metadata()
            # The file is replaced while the tensors are in use.
            hidden = [opened.get_tensor(str(number)).clone() for number in range(len(opened.keys()))]
        return int(described["layers"]), hidden, json.loads(described["names"])

    def tensors(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a finished layer."""
        yield from Checkpoint.open(self._layer(layer)).read()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _layer(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}"


@contextmanager
def unfinished(destination: Path, fingerprint: str) -> Iterator[Unfinished]:
    """Yield the state that an earlier run with the same `fingerprint` left for `destination`, in a hidden folder beside
    it.

    The folder is removed if the block ends without an error; otherwise it stays once a layer is finished. Raises
    ModelError if it cannot be written, or if another process is using it.
    """
    folder = destination.with_name(f".{destination.name}.unfinished")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ModelError(f"{destination} cannot be written ({error}). Give another destination.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ModelError(
                f"Another process is writing {destination}. Wait for it, or give another work_dir."
            ) from error
        kept = Unfinished(folder)
        try:
            _begin(folder, fingerprint)
            yield kept
            kept.discard()
        except BaseException as error:
            if not (folder / _STATE).exists():
                kept.discard()
            if isinstance(error, OSError | SafetensorError):
                raise ModelError(
                    f"{destination} could not be written ({error}). Make room, and run the same command again: what is "
                    f"finished is kept in {folder}."
                ) from error
            raise
    finally:
        os.close(lock)


def _begin(folder: Path, fingerprint: str) -> None:
    """Empty the folder unless it has this fingerprint."""
    file = folder / _FINGERPRINT
    if file.exists() and file.read_text(encoding="utf-8") == fingerprint:
        return
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    file.write_text(fingerprint, encoding="utf-8")
