"""Model families: `register` adds one, and `replaces` substitutes layers in one."""

from __future__ import annotations

from typing import Any

__all__ = ["register", "replaces"]


def __getattr__(name: str) -> Any:
    # These import torch, which users of a single module of the package may not need.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asyncllm.models import module_map, registry

    return getattr(registry if name == "register" else module_map, name)
