"""The list of models in Anthropic's format, for clients that send its header.

Documented at https://docs.claude.com/en/api/models-list.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from asyncllm.server.service import Service

__all__ = ["ModelInfo", "ModelInfoList", "list_of", "model_info"]


class ModelInfo(msgspec.Struct, kw_only=True):
    """A model or adapter."""

    id: str
    created_at: str
    display_name: str
    max_input_tokens: int
    """Maximum number of tokens of prompt and answer together."""
    lifecycle: str = "active"
    type: str = "model"


class ModelInfoList(msgspec.Struct, kw_only=True):
    """All models, on one page."""

    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False


def model_info(service: Service, name: str) -> ModelInfo:
    """Return the entry of a model."""
    created = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(id=name, created_at=created, display_name=name, max_input_tokens=service.engine.session_len)


def list_of(service: Service, names: Sequence[str]) -> ModelInfoList:
    """Return the list of these models."""
    data = [model_info(service, name) for name in names]
    return ModelInfoList(data=data, first_id=names[0], last_id=names[-1])
