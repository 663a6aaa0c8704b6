"""Whole copies of the base model's embeddings among the tensors of an adapter.

PEFT saves them with the adapter when `save_embedding_layers` is on, and when the vocabulary was resized. Copies that
repeat the base's files change nothing; all others are weights that cannot apply per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path

from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.checkpoint import COMPARED_ROWS, Checkpoint
from asyncllm.models.weights import WeightMap

__all__ = ["BaseEmbeddings"]


class BaseEmbeddings:
    """The token embedding and the output embedding in the files of a model."""

    def __init__(self, model: DecoderLM, folder: Path) -> None:
        """`folder`: the model's, whose files are read once there is a copy to compare."""
        self._model, self._folder = model, folder

    def have(self, names: Iterable[str], tensor: Tensor) -> bool:
        """Return whether the tensor, which files may call by any of these names, is an embedding of the model with the
        shape and the numbers that the model's files have. Raises InvalidCheckpoint if these cannot be read."""
        wanted = {self._place(name) for name in names} - {None}
        return bool(wanted) and any(
            self._place(name) in wanted and entry.shape == tuple(tensor.shape) and self._equal(name, tensor)
            for name, entry in self._stored.tensors.items()
        )

    @cached_property
    def _stored(self) -> Checkpoint:
        return Checkpoint.open(self._folder)

    @cached_property
    def _table(self) -> WeightMap:
        return self._model.weight_map

    def _place(self, name: str) -> str | None:
        """Return which embedding a tensor of the files is, "embed" or "head"; None for any other tensor. With tied
        embeddings, the head is the token embedding."""
        if self._model.config.tied and name.endswith(self._model.head_name):
            return "embed"
        try:
            target = self._table.resolve(name)
        except InvalidCheckpoint:
            return None
        known = target is not None and target.module in ("embed", "head") and target.keys[0][0] == "weight"
        return target.module if known and target is not None else None

    def _equal(self, name: str, tensor: Tensor) -> bool:
        rows = range(0, len(tensor), COMPARED_ROWS)
        with closing(self._stored.read([name])) as found:
            return all(
                own[first : first + COMPARED_ROWS].double().equal(tensor[first : first + COMPARED_ROWS].double())
                for _, own in found
                for first in rows
            )
