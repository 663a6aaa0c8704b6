"""ModelPlacement: which parts of a model are on its device, and the commands that move them.

    weights     on the device <-> in host memory (sleep, level 1), or lost (level 2) until they are read or given again
    kv_cache    the pool, its counterpart in host memory, graphs and everything else that steps need: allocated or freed

A command that raises an AsyncLLMError leaves everything unchanged. New weights are written in place, so that CUDA
graphs, which hold addresses, stay valid. After a sleep the addresses differ, so graphs are freed and captured together
with the cache.

Ranks carry out a command together. If one of them cannot, the others undo their changes, because a rank that continued
alone would wait forever in its next sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from asyncllm.agent.adapters import AdapterPool
from asyncllm.agent.cache.pool import available_memory
from asyncllm.agent.open_model import OpenedModel
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.layers.layer import cache_members
from asyncllm.models.loading.load_plan import load, plan_update
from asyncllm.models.loading.quantized import open_checkpoint
from asyncllm.protocol import (
    Command,
    OtherRankRefused,
    ResidentPart,
    Sleep,
    UpdateWeights,
    Wake,
)

__all__ = ["CacheHolder", "ModelPlacement"]

_Parameters = list[tuple[nn.Module, str, nn.Parameter]]


class CacheHolder(Protocol):
    """An agent, which holds everything that steps need other than weights."""

    def allocate_cache(self) -> None:
        """Allocate the cache. On ModelError, or torch's error if memory is short, hold nothing."""

    def capture(self) -> None:
        """Capture graphs over the cache, with the other ranks. Raises like `allocate_cache`; the cache stays held."""

    def release_cache(self) -> None:
        """Free the cache, if it is held."""


class ModelPlacement:
    """The parts of one model. Written by the thread that carries out commands, while no step runs."""

    def __init__(self, opened: OpenedModel, config: EngineConfig) -> None:
        """Start with the weights on the device and the cache held. Reads the adapters of `config`, and raises their
        errors."""
        self._model, self._device, self._dtype = opened.model, opened.device, opened.dtype
        self._path, self._group = opened.path, opened.group
        self._weights: Literal["device", "host", "lost"] = "device"
        self._has_cache = True
        self.adapters = AdapterPool(config, opened) if config.num_adapter_slots else None
        """None if the engine has no adapters."""

    @property
    def loaded_adapters(self) -> AdapterPool:
        """The adapters of an engine with adapter slots."""
        assert self.adapters is not None, "an engine without slots loads none"
        return self.adapters

    def _on_all_ranks(self, change: Callable[[], None], undo: Callable[[], None]) -> None:
        """Make a change on all ranks or on none: if any rank fails, `undo` is called. Raises the error of `change`, or
        OtherRankRefused if another rank failed."""
        failure: BaseException | None = None
        try:
            change()
        except BaseException as error:
            failure = error
        done = failure is None if self._group is None else bool(self._group.all_reduce_min(failure is None))
        if not done:
            undo()
            if failure is None:
                raise OtherRankRefused("Another rank could not carry this out, so this one has put back its part.")
            raise failure

    def carry_out(self, command: Command, holder: CacheHolder) -> None:
        """Carry out a command. Raises InvalidParameter for tensors that do not fit, or for a cache that is to wake
        before the weights; ModelError if memory or a checkpoint is missing, on any rank."""
        self._wait_for_device()
        try:
            match command:
                case UpdateWeights(weights):
                    self._update(weights)
                case Sleep(level):
                    self._sleep(level, holder)
                case Wake(parts):
                    self._wake(parts, holder)
        finally:
            self._wait_for_device()

    def _update(self, weights: Mapping[str, Tensor]) -> None:
        lost = self._weights == "lost"
        copy = plan_update(self._model, weights, self._model.weight_map, whole=lost)
        for device in {tensor.device for tensor in weights.values() if tensor.is_cuda}:
            # The values may still be being copied, on any stream.
            torch.cuda.synchronize(device)
        if lost:
            before = self._parameters()
            self._on_all_ranks(lambda: self._fill(copy), lambda: self._drop_weights(before))
        else:
            copy()

    def _drop_weights(self, parameters: _Parameters) -> None:
        """Drop the weights, which were these `parameters`."""
        self._set_parameters(parameters)
        self._weights = "lost"

    def _sleep(self, level: int, holder: CacheHolder) -> None:
        if level == 2:
            self._replace(lambda parameter: torch.empty_like(parameter, device="meta"))
            self._weights = "lost"
        elif self._weights == "device":
            self._move_to_host()
        self._release_cache(holder)
        self._has_cache = False

    def _move_to_host(self) -> None:
        """Copy the weights to host memory, unless they are already there."""
        if self._device.type != "cpu":
            num_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
            free = available_memory(torch.device("cpu"))
            if self._group is not None:
                # All ranks see the same figures, so all decide alike.
                num_bytes, free = (
                    -self._group.all_reduce_min(-num_bytes) * self._group.size,
                    self._group.all_reduce_min(free),
                )
            if num_bytes > free:
                raise ModelError(
                    f"The weights take {num_bytes / 2**20:.0f} MiB of host memory, and {free / 2**20:.0f} MiB are "
                    f"free. Free some, or use sleep(level=2), which keeps no weights."
                )
            self._replace(lambda parameter: parameter.to("cpu"))
        self._weights = "host"

    def _wake(self, parts: frozenset[ResidentPart], holder: CacheHolder) -> None:
        if "kv_cache" in parts and "weights" not in parts and self._weights != "device":
            raise InvalidParameter(
                "The KV cache wakes after the weights, which still sleep. Wake 'weights' first, or both.", "tags"
            )
        before, where = self._parameters(), self._weights
        takes_cache = "kv_cache" in parts and not self._has_cache

        def restore() -> None:
            if "weights" in parts:
                self._restore_weights()
            if takes_cache:
                self._allocate_cache(holder)

        def undo() -> None:
            if takes_cache:
                self._release_cache(holder)
            if where != "device":
                self._set_parameters(before)
                self._weights = where

        self._on_all_ranks(restore, undo)
        if not takes_cache:
            return
        try:
            holder.capture()
        except BaseException as error:
            if self._group is not None:
                # Other ranks may be waiting in a sum.
                raise
            undo()
            if isinstance(error, torch.OutOfMemoryError):
                raise self._no_memory("the KV cache") from error
            raise
        self._has_cache = True

    def _allocate_cache(self, holder: CacheHolder) -> None:
        try:
            if self.adapters is not None:
                self.adapters.allocate()
            holder.allocate_cache()
        except torch.OutOfMemoryError as error:
            raise self._no_memory("the KV cache") from error

    def _release_cache(self, holder: CacheHolder) -> None:
        holder.release_cache()
        if self.adapters is not None:
            self.adapters.release()

    def _restore_weights(self) -> None:
        if self._weights == "host":
            try:
                if self._device.type != "cpu":
                    self._replace(lambda parameter: parameter.to(self._device))
            except torch.OutOfMemoryError as error:
                raise self._no_memory("the weights") from error
            self._weights = "device"
        elif self._weights == "lost":
            checkpoint = open_checkpoint(self._path, self._model.scheme, self._model.expanded_modules)
            self._fill(lambda: load(self._model, checkpoint, self._model.weight_map))

    def _fill(self, fill: Callable[[], None]) -> None:
        """Allocate lost parameters and let `fill` write them."""
        before = self._parameters()
        try:
            self._model.allocate(self._dtype, self._device)
            cache_members(self._model)
            fill()
        except BaseException as error:
            self._set_parameters(before)
            if isinstance(error, torch.OutOfMemoryError):
                raise self._no_memory("the weights") from error
            raise
        self._weights = "device"

    def _parameters(self) -> _Parameters:
        return [
            (module, name, parameter)
            for module in self._model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]

    def _replace(self, made_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Replace each parameter by the tensor made from it, after all of these have been made."""
        self._set_parameters(
            [
                (module, name, nn.Parameter(made_of(parameter), requires_grad=False))
                for module, name, parameter in self._parameters()
            ]
        )

    def _set_parameters(self, parameters: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for module, name, parameter in parameters:
            setattr(module, name, parameter)
        cache_members(self._model)

    def _no_memory(self, what: str) -> ModelError:
        return ModelError(f"{self._device} has no memory left for {what}. Free some, and wake the model again.")

    def _wait_for_device(self) -> None:
        """Wait for all launched work, and return unused memory to the driver."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
