"""The public names are a list; adding or removing one is a decision, made here too."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

import asyncllm
from asyncllm import errors as asyncllm_errors

PUBLIC = [
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


def test_public_names() -> None:
    assert sorted(asyncllm.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(asyncllm))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_can_be_imported(name: str) -> None:
    assert getattr(asyncllm, name) is not None


def test_every_error_is_public() -> None:
    errors = {name for name, value in vars(asyncllm_errors).items() if inspect.isclass(value)}
    assert errors <= set(PUBLIC)
    assert all(issubclass(getattr(asyncllm, name), asyncllm.AsyncLLMError) for name in errors)


@pytest.mark.parametrize("name", ["pipeline", "serve"])
def test_a_function_is_not_hidden_by_the_module_of_its_name(name: str) -> None:
    import_module(f"asyncllm.{name}")
    assert inspect.isfunction(getattr(asyncllm, name))


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = asyncllm.nonsense
