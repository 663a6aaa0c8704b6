"""AdapterPool: the LoRA adapters of a model in host memory, some of which are also in slots on the device.

The engine decides which adapters those are: it loads and drops adapters, and names adapter and slot with each sequence
(`SlotStart`). Reading runs in its own thread while steps run; no step names an adapter before it has been read. On a
GPU an adapter is uploaded on a separate stream: after the last step that reads its slot, concurrently with all other
steps, and before the step that starts the sequence. That step is launched while the previous one runs, which usually
takes longer than the copy. If a step was never launched, the next start that names the adapter uploads it.

A slot has space for the factors of every adapted layer. The slots of a factor are adjacent, because one launch reads
all of them:

    host    | layer 0: A | B | layer 1: A | B | ...                     an adapter
    device  | layer 0: A of all slots | B of all slots | layer 1: ...   layers see [slots, ...] views
    ranks   [slots, layers]

An adapter is uploaded in one copy, and one launch or a few move its factors to their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.agent.cache.pool import available_memory
from asyncllm.agent.open_model import OpenedModel
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidCheckpoint, InvalidParameter, ModelError, UnsupportedModel, short
from asyncllm.kernels import LoRAWeights
from asyncllm.layers.linear import Linear
from asyncllm.layers.lora import LayerAdapters
from asyncllm.models.loading.adapter_files import MAX_RANK, AdapterFiles, takes_adapters
from asyncllm.protocol import LoadAdapter

__all__ = ["NO_ADAPTER", "AdapterPool"]

NO_ADAPTER = 0
"""The number of an adapter that adds nothing, for steps that only compile kernels."""

_MIN_RANK = 16
"""Lowest rank of a slot: tensor cores cannot multiply narrower matrices."""

_ALIGNMENT = 16
"""Matrices begin at multiples of this many numbers, because kernels assume an alignment of 16 bytes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The places of one layer's factors in a slot."""

    path: str
    layer: Linear
    a: slice
    b: slice

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows.stop - rows.start for rows in self.layer.rows.values())


@dataclass(frozen=True, slots=True)
class _Outline:
    """The properties of an initial adapter that determine the slots. Its tensors are read again once the slots exist,
    because the tensors of all adapters together may not fit in memory."""

    rank: int
    layers: frozenset[str]
    digest: str

    @classmethod
    def of(cls, files: AdapterFiles) -> _Outline:
        return cls(files.rank, frozenset(files.layers), files.digest)


class _HostAdapter:
    """An adapter in host memory, laid out as in a slot."""

    def __init__(self, values: Tensor, ranks: Tensor) -> None:
        self.values = values
        self.ranks = ranks


class AdapterPool:
    """Written by the thread that launches steps, or that carries out commands while none runs; `_host` by any
    thread."""

    def __init__(self, config: EngineConfig, opened: OpenedModel) -> None:
        """Read the adapters of `config.adapters`, numbered from 1 in order, and create slots for the layers that they
        target; without adapters, for every linear layer that can have them.

        Raises ModelError, and InvalidParameter for a rank above `max_lora_rank`.
        """
        self._model = model = opened.model
        self._dtype, self._device, self._base = opened.dtype, opened.device, opened.path
        paths = {name: Path(path) for name, path in (config.adapters or {}).items()}
        read = {folder: _Outline.of(self._files(folder)) for folder in dict.fromkeys(paths.values())}
        self._digests = tuple(read[folder].digest for folder in paths.values())
        highest = max((outline.rank for outline in read.values()), default=_MIN_RANK)
        self._max_rank = min(config.max_lora_rank or highest, MAX_RANK)
        self._slot_rank = max(_MIN_RANK, 1 << (self._max_rank - 1).bit_length())
        """Rank of a slot."""
        self.num_slots = config.num_adapter_slots
        targets = {path for outline in read.values() for path in outline.layers}
        self._places: list[_Place] = []
        self._size = 0
        """Number of numbers in a slot."""
        for path, layer in _linear_layers(model).items():
            if path in targets or not targets:
                self._places.append(self._place(path, layer))
        self._host: dict[int, _HostAdapter] = {}
        self._content: dict[int, int] = {}
        """Slot -> number of its adapter."""
        self.uploads: torch.cuda.Stream | None = None
        """The stream of uploads; None: the computing stream."""
        if self._device.type == "cuda":
            self.uploads = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._staging = torch.empty(0, dtype=self._dtype)
        """The adapter that `uploads` copied last, laid out as in host memory; empty without such a stream."""
        self._last_read: dict[int, torch.cuda.Event] = {}
        """Slot -> the end of the last launched step that reads it."""
        for name, folder in paths.items():
            try:
                self._check_rank(read[folder].rank)
            except InvalidParameter as error:
                raise InvalidParameter(f"adapters: {name!r}: {error}", "adapters") from None
        self._num_host = opened.min_over_ranks(
            self._max_host_adapters(config, 1 if opened.group is None else opened.group.size)
        )
        packed: dict[Path, _HostAdapter] = {}
        for number, folder in enumerate(islice(paths.values(), self._num_host), start=1):
            if folder not in packed:
                packed[folder] = self._packed(self._files(folder))
            self._host[number] = packed[folder]
        self.allocate()

    def limits(self) -> dict[str, Any]:
        """Return the fields of `Limits` that concern adapters."""
        return {
            "num_adapter_slots": self.num_slots,
            "num_host_adapters": self._num_host,
            "adapter_digests": self._digests,
        }

    def _max_host_adapters(self, config: EngineConfig, num_ranks: int) -> int:
        """Return how many adapters host memory holds. Raises InvalidParameter if it holds none."""
        size = self._size * self._dtype.itemsize
        budget = config.lora_host_mb * 2**20 or available_memory(torch.device("cpu")) // 4
        count = budget // (size * num_ranks)
        if not count and config.lora_host_mb:
            raise InvalidParameter(
                f"An adapter of rank {self._slot_rank} takes {size * num_ranks / 2**20:.1f} MiB of host memory, and "
                f"lora_host_mb is {config.lora_host_mb}. Raise it, or leave it out.",
                "lora_host_mb",
            )
        return max(count, 1)

    def _place(self, path: str, layer: Linear) -> _Place:
        starts = []
        for count in (len(layer.rows) * self._slot_rank * layer.in_features, layer.out_features * self._slot_rank):
            starts.append(slice(self._size, self._size + count))
            self._size += _aligned(count)
        return _Place(path, layer, *starts)

    def allocate(self) -> None:
        """Allocate the slots, and give the layers their views. Raises ModelError if memory is short."""
        num_slots, rank = self.num_slots, self._slot_rank
        try:
            self._values = torch.zeros(num_slots * self._size, dtype=self._dtype, device=self._device)
            if self.uploads is not None:
                self._staging = torch.empty(self._size, dtype=self._dtype, device=self._device)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            raise ModelError(
                f"{num_slots} slots for adapters of rank {rank} take "
                f"{num_slots * self._size * self._dtype.itemsize / 2**20:.0f} MiB, which {self._device} does not have "
                f"free. Lower max_loras or max_lora_rank."
            ) from error
        self._ranks = torch.zeros(num_slots, len(self._places), dtype=torch.int32, device=self._device)
        self.read_by_steps(range(num_slots))  # The first upload has to come after the zeros.
        for index, place in enumerate(self._places):
            layer = place.layer
            a = self._of_slots(place.a).view(num_slots, -1, layer.in_features)
            b = self._of_slots(place.b).view(num_slots, layer.out_features, rank)
            layer.adapters = LayerAdapters(LoRAWeights(a, b, self._ranks[:, index], place.sizes))

    def _factors(self) -> Iterator[slice]:
        for place in self._places:
            yield from (place.a, place.b)

    def _of_slots(self, factor: slice) -> Tensor:
        """Return a factor's numbers in all slots, [slots, numbers]."""
        size = factor.stop - factor.start
        row = _aligned(size)
        return self._values.narrow(0, self.num_slots * factor.start, self.num_slots * row).view(-1, row)[:, :size]

    def release(self) -> None:
        """Free the memory on the device. The layers must not be called any more."""
        for place in self._places:
            place.layer.adapters = None
        self._content.clear()
        self._last_read.clear()
        self._values = self._staging = self._ranks = torch.empty(0)

    def load(self, adapter: LoadAdapter) -> str:
        """Read an adapter into host memory, and return the digest of its files. Callable from any thread, while steps
        run. Raises ModelError and InvalidParameter, and then changes nothing."""
        files = self._files(Path(adapter.path))
        if adapter.digest not in ("", files.digest):
            raise InvalidCheckpoint(
                f"{adapter.path} has changed since it was loaded as {short(adapter.name)}, and answers must not mix "
                f"the two. Load it again, under this or another name."
            )
        self._host[adapter.number] = self._packed(files)
        return files.digest

    def _files(self, folder: Path) -> AdapterFiles:
        return AdapterFiles.read(folder, self._model, self._base)

    def drop(self, number: int) -> None:
        """Free the host memory of an adapter that no unread step names. Callable from any thread."""
        self._host.pop(number, None)

    def put(self, number: int, slot: int) -> None:
        """Make sure that a slot holds an adapter for further work of the current stream."""
        if self._content.get(slot) == number:
            return
        if number == NO_ADAPTER:
            self._ranks[slot].zero_()
        elif self.uploads is None:
            self._copy(self._host[number], slot)
        else:
            self.uploads.wait_event(self._last_read[slot])
            with torch.cuda.stream(self.uploads):
                self._copy(self._host[number], slot)
            torch.cuda.current_stream().wait_stream(self.uploads)
        self._content[slot] = number

    def _copy(self, host: _HostAdapter, slot: int) -> None:
        values = host.values if self.uploads is None else self._staging.copy_(host.values, non_blocking=True)
        places = [self._of_slots(factor)[slot] for factor in self._factors()]
        torch._foreach_copy_(places, [values[factor] for factor in self._factors()])
        self._ranks[slot].copy_(host.ranks, non_blocking=True)

    def read_by_steps(self, slots: Iterable[int]) -> None:
        """Note that the work enqueued so far on the current stream reads or writes these slots."""
        if self.uploads is not None:
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
            self._last_read.update(dict.fromkeys(slots, end))

    def _check_rank(self, rank: int) -> None:
        if rank > self._max_rank:
            raise InvalidParameter(
                f"the adapter has rank {rank}, and slots were made for {self._max_rank}. Start the engine with "
                f"max_lora_rank={rank}.",
                "max_lora_rank",
            )

    def _packed(self, files: AdapterFiles) -> _HostAdapter:
        """Return an adapter in the layout of a slot."""
        self._check_rank(files.rank)
        slot_rank, known = self._slot_rank, {place.path for place in self._places}
        lacking = [path for path in files.layers if path not in known]
        if lacking:
            raise UnsupportedModel(
                f"The adapter is for {lacking[0]} as well, and slots were made for the layers of the adapters that the "
                f"engine was started with. Start it with this one in adapters, or with max_loras and no adapters."
            )
        pinned = self._device.type == "cuda"
        values = torch.zeros(self._size, dtype=self._dtype, pin_memory=pinned)
        ranks = torch.zeros(len(self._places), dtype=torch.int32, pin_memory=pinned)
        for index, place in enumerate(self._places):
            layer = place.layer
            a = values[place.a].view(len(layer.rows), slot_rank, layer.in_features)
            b = values[place.b].view(layer.out_features, slot_rank)
            for factors in files.layers.get(place.path, ()):
                rank = len(factors.a)
                a[list(layer.rows).index(factors.part), :rank] = factors.a
                b[layer.rows[factors.part], :rank] = factors.b
                ranks[index] = max(int(ranks[index]), rank)
        return _HostAdapter(values, ranks)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _linear_layers(model: nn.Module) -> dict[str, Linear]:
    """Return path -> layer of the layers that adapters may target."""
    return {path: module for path, module in model.named_modules() if takes_adapters(module, path)}
