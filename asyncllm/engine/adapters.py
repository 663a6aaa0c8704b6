"""AdapterTable: the loaded LoRA adapters of an engine, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.config.engine import check_adapter_name
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.errors import InvalidParameter, UnsupportedFeature, short
from asyncllm.protocol import LoadAdapter

__all__ = ["AdapterTable"]


class AdapterTable:
    """The loaded adapters, and the names of those being loaded. Written by the engine's calls and by `Control`."""

    def __init__(self, num_slots: int, adapters: Mapping[str, str]) -> None:
        """`adapters`: name -> path of the adapters that the executor has loaded at start, under the numbers 1, 2 and so
        on."""
        self._num_slots = num_slots
        self._by_name = {name: Adapter(index, name, path) for index, (name, path) in enumerate(adapters.items(), 1)}
        self._next_number = len(self._by_name) + 1
        self._loading: set[str] = set()

    @property
    def paths(self) -> dict[str, str]:
        """Name -> path of each adapter that requests may name."""
        return {name: adapter.path for name, adapter in self._by_name.items()}

    def find(self, name: Any, param: str = "adapter_name") -> Adapter:
        """Return the adapter of this name. Raises InvalidParameter."""
        adapter = self._by_name.get(name) if isinstance(name, str) else None
        if adapter is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise InvalidParameter(
                f"{param} is {short(name)}, and no adapter of that name is loaded (loaded: {known}). Name one of them, "
                f"leave {param} out for the model itself, or load it with EngineConfig.adapters or load_adapter.",
                param,
            )
        return adapter

    def begin(self, name: Any, path: str) -> LoadAdapter:
        """Return the command that loads an adapter, with a new number. The name is reserved until `end`. Raises
        InvalidParameter, and UnsupportedFeature if the engine has no room for adapters."""
        if not self._num_slots:
            raise UnsupportedFeature(
                "The engine was started without room for adapters. Start it with EngineConfig(max_loras=...), the "
                "number of adapters that are on the device at a time.",
                "name",
            )
        check_adapter_name(name, "name")
        if name in self._by_name or name in self._loading:
            raise InvalidParameter(
                f"An adapter {short(name)} is loaded, or about to be. Unload it first, or choose another name.", "name"
            )
        self._loading.add(name)
        self._next_number += 1
        return LoadAdapter(self._next_number - 1, name, path)

    def end(self, command: LoadAdapter) -> None:
        """Free the name of a command that has ended, or was never given to the executor."""
        self._loading.discard(command.name)

    def add(self, command: LoadAdapter) -> None:
        """Let requests name a loaded adapter."""
        self._by_name[command.name] = Adapter(command.number, command.name, command.path)

    def remove(self, name: Any) -> Adapter:
        """Remove an adapter, which open requests keep, and return it. Raises InvalidParameter."""
        adapter = self.find(name, "name")
        del self._by_name[adapter.name]
        adapter.retired = True
        return adapter
