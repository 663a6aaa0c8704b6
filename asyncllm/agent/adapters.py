"""AdapterPool: the LoRA adapters of a model. All that are loaded lie in host memory, some in slots on the device.

Which adapter is in which slot is the engine's choice, and comes with each sequence (`SlotStart`). On a GPU an adapter
comes up on a stream of its own: behind the last step that reads its slot, beside all others, and ahead of the step that
brings it. That one is launched while the step before it runs, which as a rule takes longer than the copy. What a step
that was never launched should have brought up, the next start that names it brings.

A slot is one run of memory with room for the factors of every adapted layer, so that an adapter comes up in one copy:

    slot    | layer 0: A, B | layer 1: A, B | ...      at the same places in host memory; layers see [slots, ...] views
    ranks   [slots, layers]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from asyncllm.agent.open_model import OpenedModel
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter, ModelError, UnsupportedModel
from asyncllm.kernels import LoRAWeights
from asyncllm.layers.linear import Linear
from asyncllm.layers.lora import LayerAdapters
from asyncllm.models.adapter_files import MAX_RANK, AdapterFiles, takes_adapters

__all__ = ["NO_ADAPTER", "AdapterPool"]

NO_ADAPTER = 0
"""The number of an adapter that adds nothing, for steps that only compile kernels."""

_LEAST_RANK = 16
"""Of a slot: tensor cores multiply no narrower matrices."""

_ALIGNMENT = 16
"""Numbers: kernels assume that a matrix begins at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the factors of one layer are in a slot."""

    path: str
    layer: Linear
    a: slice
    b: slice

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows.stop - rows.start for rows in self.layer.rows.values())


class _Host:
    """An adapter in host memory: what goes into a slot."""

    def __init__(self, values: Tensor, ranks: Tensor) -> None:
        self.values = values
        self.ranks = ranks


class AdapterPool:
    """Written by the thread that launches steps, or carries out commands while none runs."""

    def __init__(self, config: EngineConfig, opened: OpenedModel) -> None:
        """Read the adapters of `config.adapters`, numbered from 1 in their order, and give the layers that they target
        slots; all linear layers that can have some if there are none.

        Raises ModelError, and InvalidParameter for a rank above `max_lora_rank`.
        """
        self._model = model = opened.model
        self._dtype, self._device = opened.dtype, opened.device
        read = {name: AdapterFiles.read(Path(path), model) for name, path in (config.adapters or {}).items()}
        highest = max((files.rank for files in read.values()), default=_LEAST_RANK)
        self._max_rank = min(config.max_lora_rank or highest, MAX_RANK)
        self._room = max(_LEAST_RANK, 1 << (self._max_rank - 1).bit_length())
        """Rank of a slot."""
        self.num_slots = config.max_loras or len(read)
        targets = {path for files in read.values() for path in files.layers}
        self._places: list[_Place] = []
        self._size = 0
        """Numbers of a slot."""
        for path, layer in _linear_layers(model).items():
            if path in targets or not targets:
                self._places.append(self._place(path, layer))
        self._host: dict[int, _Host] = {}
        self._content: dict[int, int] = {}
        """Slot -> the number of what it holds."""
        self.uploads: torch.cuda.Stream | None = None
        """Where adapters come up; None: where steps are computed."""
        if self._device.type == "cuda":
            self.uploads = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._last_read: dict[int, torch.cuda.Event] = {}
        """Slot -> the end of the last launched step that reads it."""
        for number, (name, files) in enumerate(read.items(), start=1):
            try:
                self._host[number] = self._packed(files)
            except InvalidParameter as error:
                raise InvalidParameter(f"adapters: {name!r}: {error}", "adapters") from None
        self.allocate()

    def _place(self, path: str, layer: Linear) -> _Place:
        starts = []
        for count in (len(layer.rows) * self._room * layer.in_features, layer.out_features * self._room):
            starts.append(slice(self._size, self._size + count))
            self._size += -(-count // _ALIGNMENT) * _ALIGNMENT
        return _Place(path, layer, *starts)

    def allocate(self) -> None:
        """Take memory for the slots, and let the layers see it. Raises ModelError when there is none."""
        num_slots, room = self.num_slots, self._room
        try:
            self._values = torch.zeros(num_slots, self._size, dtype=self._dtype, device=self._device)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            raise ModelError(
                f"{num_slots} slots for adapters of rank {room} take "
                f"{num_slots * self._size * self._dtype.itemsize / 2**20:.0f} MiB, which {self._device} does not have "
                f"free. Lower max_loras or max_lora_rank."
            ) from error
        self._ranks = torch.zeros(num_slots, len(self._places), dtype=torch.int32, device=self._device)
        self.read_by_steps(range(num_slots))  # what is written first comes behind the zeros
        for index, place in enumerate(self._places):
            layer = place.layer
            a = self._values[:, place.a].view(num_slots, -1, layer.in_features)
            b = self._values[:, place.b].view(num_slots, layer.out_features, room)
            layer.adapters = LayerAdapters(LoRAWeights(a, b, self._ranks[:, index], place.sizes))

    def release(self) -> None:
        """Give the memory on the device back; the layers are not to be called any more."""
        for place in self._places:
            place.layer.adapters = None
        self._content.clear()
        self._last_read.clear()
        self._values = self._ranks = torch.empty(0)

    def load(self, number: int, path: str) -> None:
        """Read an adapter into host memory. Raises ModelError and InvalidParameter; nothing is changed then."""
        self._host[number] = self._packed(AdapterFiles.read(Path(path), self._model))

    def unload(self, number: int) -> None:
        """Forget an adapter, which no sequence has."""
        self._host.pop(number, None)

    def put(self, number: int, slot: int) -> None:
        """See to it that a slot holds an adapter for all that is launched on the current stream from now on."""
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

    def _copy(self, host: _Host, slot: int) -> None:
        self._values[slot].copy_(host.values, non_blocking=True)
        self._ranks[slot].copy_(host.ranks, non_blocking=True)

    def read_by_steps(self, slots: Iterable[int]) -> None:
        """Take note that what is launched on the current stream so far reads, or writes, these slots."""
        if self.uploads is not None:
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
            self._last_read.update(dict.fromkeys(slots, end))

    def _packed(self, files: AdapterFiles) -> _Host:
        """Return an adapter as it lies in a slot."""
        if files.rank > self._max_rank:
            raise InvalidParameter(
                f"the adapter has rank {files.rank}, and slots were made for {self._max_rank}. Start the engine with "
                f"max_lora_rank={files.rank}.",
                "max_lora_rank",
            )
        room, known = self._room, {place.path for place in self._places}
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
            a = values[place.a].view(len(layer.rows), room, layer.in_features)
            b = values[place.b].view(layer.out_features, room)
            for factors in files.layers.get(place.path, ()):
                rank = len(factors.a)
                a[list(layer.rows).index(factors.part), :rank] = factors.a
                b[layer.rows[factors.part], :rank] = factors.b
                ranks[index] = max(int(ranks[index]), rank)
        return _Host(values, ranks)


def _linear_layers(model: nn.Module) -> dict[str, Linear]:
    """Return the layers that adapters may be for, by path."""
    return {path: module for path, module in model.named_modules() if takes_adapters(module, path)}
