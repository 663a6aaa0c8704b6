"""ExpandedCheckpoint: a checkpoint some of whose quantized weights are read as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.models.loading.checkpoint import Checkpoint, TensorEntry
from asyncllm.quant.expansion import Expansion

__all__ = ["ExpandedCheckpoint"]

_BYTES = 4
"""Bytes of a float32 number."""


class ExpandedCheckpoint(Checkpoint):
    """The tensors of `stored`, with each expansion in place of its sources."""

    def __init__(self, stored: Checkpoint, expansions: Iterable[Expansion]) -> None:
        self._stored = stored
        self._expansions: Mapping[str, Expansion] = {each.name: each for each in expansions}
        taken = {name for each in self._expansions.values() for name in (*each.sources.values(), *each.left_out)}
        made = [
            TensorEntry(
                each.name,
                "F32",
                each.shape,
                stored.tensors[next(iter(each.sources.values()))].file,
                data_start=0,
                start=0,
                end=_BYTES * math.prod(each.shape),
            )
            for each in self._expansions.values()
        ]
        super().__init__(stored.folder, [*(e for name, e in stored.tensors.items() if name not in taken), *made])
        self.expanded = self._expansions.keys()

    @property
    def num_bytes(self) -> int:
        return self._stored.num_bytes

    def read(self, names: Iterable[str] | None = None) -> Generator[tuple[str, Tensor], None, None]:
        wanted = list(self.tensors if names is None else names)
        yield from super().read([name for name in wanted if name not in self.expanded])
        yield from self.expand(wanted, torch.device("cpu"))

    def expand(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        of_source = {
            source: (self._expansions[name], suffix)
            for name in names
            if name in self.expanded
            for suffix, source in self._expansions[name].sources.items()
        }
        waiting: dict[str, dict[str, Tensor]] = {}
        for source, tensor in self._stored.read(of_source):
            expansion, suffix = of_source[source]
            have = waiting.setdefault(expansion.name, {})
            have[suffix] = tensor.to(device, copy=True)
            if len(have) < len(expansion.sources):
                continue
            del waiting[expansion.name]
            try:
                yield expansion.name, expansion.expand(have)
            except InvalidCheckpoint as error:
                raise InvalidCheckpoint(f"{short(expansion.name)}: {error}") from None

    def equal(self, first: str, second: str) -> bool:
        # An expanded weight was rounded, so it is not a copy of an unquantized one.
        return not {first, second} & self.expanded and super().equal(first, second)
