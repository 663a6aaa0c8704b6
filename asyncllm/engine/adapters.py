"""AdapterTable: the loaded LoRA adapters of an engine, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from asyncllm.config.engine import check_adapter_name
from asyncllm.engine.requests.prompt_encoder import PromptEncoder
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.errors import InvalidParameter, UnsupportedFeature, short

__all__ = ["AdapterTable"]


class AdapterTable:
    """The loaded adapters, and the names of those being loaded. Written by calls of the engine."""

    def __init__(
        self,
        num_slots: int,
        adapters: Mapping[str, str],
        digests: Sequence[str] = (),
        encoders: Mapping[str, PromptEncoder] = MappingProxyType({}),
    ) -> None:
        """`adapters`: name -> path of the adapters that the executor loads at its start, numbered from 1. `digests`:
        the digests of their files. `encoders`: by name, as for `add`."""
        self._num_slots = num_slots
        self._by_name = {name: Adapter(index, name, path) for index, (name, path) in enumerate(adapters.items(), 1)}
        for adapter, digest in zip(self, digests, strict=False):
            adapter.digest = digest
        self._next_number = len(self._by_name) + 1
        self._loading: set[str] = set()
        self._encoders = dict(encoders)
        """By name, the encoders of adapters that have their own chat template."""

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_name.values())

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

    def encoder_of(self, name: str) -> PromptEncoder | None:
        """Return the prompt encoder of an adapter, or None if it uses the model's chat template. Raises
        InvalidParameter."""
        return self._encoders.get(self.find(name).name)

    def begin(self, name: Any, path: str, *, replace: bool = False) -> Adapter:
        """Reserve a name until `end`, and return an adapter with a new number, to be read. `replace`: the name may be
        that of a loaded adapter. Raises InvalidParameter, and UnsupportedFeature if the engine has no adapter slots."""
        if not self._num_slots:
            raise UnsupportedFeature(
                "The engine was started without room for adapters. Start it with EngineConfig(max_loras=...), the "
                "number of adapters that are on the device at a time.",
                "name",
            )
        check_adapter_name(name, "name")
        if name in self._loading or (name in self._by_name and not replace):
            raise InvalidParameter(
                f"An adapter {short(name)} is loaded, or about to be. Unload it first, replace it, or choose another "
                f"name.",
                "name",
            )
        self._loading.add(name)
        self._next_number += 1
        return Adapter(self._next_number - 1, name, path)

    def end(self, adapter: Adapter) -> None:
        """Release the name of an adapter that has been read, or could not be read."""
        self._loading.discard(adapter.name)

    def add(self, adapter: Adapter, encoder: PromptEncoder | None) -> Adapter | None:
        """Make an adapter that has been read available to requests. Return the adapter that had its name, which open
        requests keep using. `encoder`: for the adapter's own chat template, or None."""
        former = self._by_name.pop(adapter.name, None)
        self._encoders.pop(adapter.name, None)
        if encoder is not None:
            self._encoders[adapter.name] = encoder
        if former is not None:
            former.retired = True
        self._by_name[adapter.name] = adapter
        return former

    def remove(self, name: Any) -> Adapter:
        """Remove an adapter and return it; open requests keep using it. Raises InvalidParameter."""
        adapter = self.find(name, "name")
        del self._by_name[adapter.name]
        self._encoders.pop(adapter.name, None)
        adapter.retired = True
        return adapter
