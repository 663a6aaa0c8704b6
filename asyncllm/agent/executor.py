"""Which executor runs the steps of an engine: in a thread on a CPU, launched from the event loop on a GPU."""

from __future__ import annotations

from pathlib import Path

from asyncllm.batch import Executor
from asyncllm.config import EngineConfig

__all__ = ["open_executor"]


def open_executor(config: EngineConfig, model_path: Path) -> Executor:
    """The executor for `config`, not yet started. `model_path` is the checkpoint's folder.

    Imports torch, which takes seconds. Raises InvalidParameter when `device_type` asks for a device that is not there.
    """
    from asyncllm.agent.opening import choose_device

    if choose_device(config).type == "cpu":
        from asyncllm.agent.model_agent import ModelAgent
        from asyncllm.agent.thread_executor import ThreadExecutor

        return ThreadExecutor(lambda: ModelAgent(config, model_path))

    from asyncllm.agent.device_agent import DeviceAgent
    from asyncllm.agent.stream_executor import StreamExecutor, release_memory

    return StreamExecutor(lambda: DeviceAgent(config, model_path), release=release_memory)
