"""LLM inference as an asyncio library.

    async with AsyncEngine("tiny-chat") as llm:
        async for chunk in llm.generate("What is 17 + 25?"):
            print(chunk.text, end="", flush=True)

Names are imported on first use, so that `import asyncllm` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imported now, since a later import of the modules with these names would hide the functions.
from asyncllm.pipeline import Pipeline, pipeline
from asyncllm.serve import client, serve

if TYPE_CHECKING:
    from asyncllm.config import (
        ChatTemplateConfig,
        EngineConfig,
        GenerationConfig,
        PytorchEngineConfig,
        ServerConfig,
        TurbomindEngineConfig,
        VisionConfig,
    )
    from asyncllm.engine.async_engine import AsyncEngine
    from asyncllm.engine.requests.generation import Generation, Session
    from asyncllm.engine.stats import EngineStats
    from asyncllm.errors import (
        AsyncLLMError,
        ContextLengthExceeded,
        DeadlineExceeded,
        EngineClosed,
        EngineDead,
        EngineError,
        InvalidCheckpoint,
        InvalidMessage,
        InvalidParameter,
        InvalidRequest,
        ModelError,
        ModelNotFound,
        QueueFull,
        RequestFailed,
        ServerError,
        ServerUnreachable,
        SessionBusy,
        SessionError,
        SessionNotFound,
        UnsupportedFeature,
        UnsupportedModel,
    )
    from asyncllm.http_client.api_client import APIClient
    from asyncllm.tokenizer import Tokenizer
    from asyncllm.types import Chunk, Embedding, FinishReason, Message, Response, SequenceScores

__version__ = "0.1.0"
version_info = tuple(int(part) for part in __version__.split("."))

__all__ = [
    "APIClient",
    "AsyncEngine",
    "AsyncLLMError",
    "ChatTemplateConfig",
    "Chunk",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Embedding",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "Generation",
    "GenerationConfig",
    "InvalidCheckpoint",
    "InvalidMessage",
    "InvalidParameter",
    "InvalidRequest",
    "Message",
    "ModelError",
    "ModelNotFound",
    "Pipeline",
    "PytorchEngineConfig",
    "QueueFull",
    "RequestFailed",
    "Response",
    "SequenceScores",
    "ServerConfig",
    "ServerError",
    "ServerUnreachable",
    "Session",
    "SessionBusy",
    "SessionError",
    "SessionNotFound",
    "Tokenizer",
    "TurbomindEngineConfig",
    "UnsupportedFeature",
    "UnsupportedModel",
    "VisionConfig",
    "__version__",
    "client",
    "pipeline",
    "serve",
    "version_info",
]

_HOMES = {
    "APIClient": "asyncllm.http_client.api_client",
    "AsyncEngine": "asyncllm.engine.async_engine",
    "EngineStats": "asyncllm.engine.stats",
    "Generation": "asyncllm.engine.requests.generation",
    "Session": "asyncllm.engine.requests.generation",
    "Tokenizer": "asyncllm.tokenizer",
    **dict.fromkeys(("Chunk", "Embedding", "FinishReason", "Message", "Response", "SequenceScores"), "asyncllm.types"),
    **dict.fromkeys(
        (
            "ChatTemplateConfig",
            "EngineConfig",
            "GenerationConfig",
            "PytorchEngineConfig",
            "ServerConfig",
            "TurbomindEngineConfig",
            "VisionConfig",
        ),
        "asyncllm.config",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "asyncllm.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
