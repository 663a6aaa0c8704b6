"""Which agent runs the steps of an engine: one that computes them in a thread, or one that launches them on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from asyncllm.agent.contained_runner import BatchRunner, ContainedRunner
from asyncllm.agent.context import context_meanwhile
from asyncllm.agent.stream_executor import StepLauncher, StreamExecutor
from asyncllm.batch import Executor, StartTimes
from asyncllm.config import EngineConfig

__all__ = ["Agent", "open_executor"]

Agent = BatchRunner | StepLauncher
"""What runs the steps, or launches them."""


def open_executor(config: EngineConfig, model_path: Path, *, wrap: Callable[[Agent], Agent] | None = None) -> Executor:
    """The executor for `config`, not yet started. `model_path` is the checkpoint's folder.

    `wrap` gets the agent when it is made, and returns what stands in front of it.
    """

    def load() -> Agent:
        agent = open_agent()
        if wrap is not None:
            agent = wrap(agent)
        return agent if isinstance(agent, StepLauncher) else ContainedRunner(agent)

    def open_agent() -> Agent:
        times = StartTimes()
        with nullcontext() if config.device_type == "cpu" else context_meanwhile():
            from asyncllm.agent.opening import choose_device

        if choose_device(config).type == "cpu":
            from asyncllm.agent.model_agent import ModelAgent

            times.lap("import")
            return ModelAgent(config, model_path, times=times)
        from asyncllm.agent.device_agent import DeviceAgent

        times.lap("import")
        return DeviceAgent(config, model_path, times=times)

    return StreamExecutor(load, release=_release_memory)


def _release_memory() -> None:
    """Give the device memory that nothing refers to any more back to the system. A lost device gives none."""
    import gc

    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        with suppress(torch.AcceleratorError):
            torch.cuda.empty_cache()
