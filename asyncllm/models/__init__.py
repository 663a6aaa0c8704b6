"""Families of models; `register` adds one."""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    # The registry is imported with torch, which those who look for one module of the package may not need.
    if name != "register":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asyncllm.models.registry import register

    return register
