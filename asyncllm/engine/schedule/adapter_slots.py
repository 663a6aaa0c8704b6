"""AdapterSlots: which LoRA adapters are in the device's slots."""

from __future__ import annotations

from collections import Counter, OrderedDict

__all__ = ["Adapter", "AdapterSlots"]


class Adapter:
    """A loaded adapter. Loading the same name again makes another Adapter."""

    def __init__(self, number: int, name: str, path: str) -> None:
        self.number = number
        """Its identity for the agent and the prefix cache; unique within an engine."""
        self.name = name
        self.path = path
        self.num_requests = 0
        """Open requests that use it. Written by the engine loop."""
        self.num_waiting = 0
        """Requests that wait for the adapter before they are opened. Written by `HostAdapters`."""
        self.digest = ""
        """Digest of its files when they were first read; empty before. Written by `HostAdapters`."""
        self.retired = False
        """Whether the adapter was unloaded; it is freed with its last request."""

    @property
    def in_use(self) -> bool:
        """Whether a request needs the adapter in host memory."""
        return self.num_requests + self.num_waiting > 0


class AdapterSlots:
    """An adapter keeps its slot while running sequences use it. Afterwards it is evicted when another adapter needs the
    slot, least recently used first. Written by the scheduler.

    Steps run in the order in which they are scheduled, so a slot can be reused at once: steps in flight read it before
    the step that overwrites it.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        """Adapter number -> its slot."""
        self._running: Counter[int] = Counter()
        """Adapter number -> number of running sequences that use it."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Numbers of the adapters that have a slot but no running sequence, least recently used first."""
        self.num_taken = 0
        """How many times an adapter was loaded into a slot."""

    @property
    def num_running(self) -> int:
        """Number of adapters that running sequences use."""
        return len(self._running)

    @property
    def resident(self) -> dict[int, int]:
        """Number of each adapter on the device -> its slot."""
        return dict(self._slot_of)

    def has_room(self, adapter: Adapter) -> bool:
        """Return whether the adapter has a slot or can get one."""
        return adapter.number in self._slot_of or bool(self._free or self._idle)

    def take(self, adapter: Adapter) -> int:
        """Return the slot of an adapter for one more running sequence. The caller has checked `has_room`."""
        number = adapter.number
        if number not in self._slot_of:
            self._slot_of[number] = self._free.pop() if self._free else self._evict()
            self.num_taken += 1
        self._idle.pop(number, None)
        self._running[number] += 1
        return self._slot_of[number]

    def give_back(self, adapter: Adapter) -> None:
        """Count one running sequence less."""
        self._running[adapter.number] -= 1
        if not self._running[adapter.number]:
            del self._running[adapter.number]
            self._idle[adapter.number] = None

    def forget(self, number: int) -> None:
        """Free the slot of an adapter that no sequence will use again."""
        if number in self._idle:
            del self._idle[number]
            self._free.append(self._slot_of.pop(number))

    def _evict(self) -> int:
        number, _ = self._idle.popitem(last=False)
        return self._slot_of.pop(number)

    def check_integrity(self, running: Counter[int]) -> None:
        """Raise AssertionError unless slots are held by the adapters of the `running` sequences, or idle."""
        assert self._running == running, f"slots are held for {self._running}, and {running} run"
        assert set(self._slot_of) == set(self._running) | set(self._idle), "an adapter's slot is neither held nor idle"
        assert not set(self._running) & set(self._idle), "an adapter with sequences is idle"
        slots = [*self._slot_of.values(), *self._free]
        assert len(set(slots)) == len(slots), f"adapter slots are doubled: {slots}"
