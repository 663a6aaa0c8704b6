"""What callers pass to `update_weights`, `sleep` and `wake`, as checked commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from asyncllm.batch import ResidentPart, Sleep, UpdateWeights, Wake
from asyncllm.errors import InvalidParameter, short

__all__ = ["PARTS", "Weights", "sleep_of", "update_of", "wake_of"]

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""torch.Tensor by name, or pairs of both."""

PARTS: frozenset[ResidentPart] = frozenset(get_args(ResidentPart))


def update_of(weights: Any) -> UpdateWeights:
    """Raises InvalidParameter unless there are pairs of a name and a tensor, and each name once."""
    if not isinstance(weights, Iterable):
        raise InvalidParameter(
            f"weights must be a mapping of names to tensors, or pairs of them, not {type(weights).__name__}.", "weights"
        )
    named: dict[str, Any] = {}
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidParameter(
                f"weights must be a mapping of names to tensors, or pairs of them, and hold {short(pair)}.", "weights"
            )
        if pair[0] in named:
            raise InvalidParameter(f"weights name {short(pair[0])} twice. Give each tensor once.", "weights")
        named[pair[0]] = pair[1]
    return UpdateWeights(named)


def sleep_of(level: Any) -> Sleep:
    """Raises InvalidParameter for a level that is neither 1 nor 2."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidParameter(
            f"level must be 1, which keeps the weights in host memory, or 2, which keeps none (given: {level!r}).",
            "level",
        )
    return Sleep(level)


def wake_of(tags: Any) -> Wake:
    """None: everything. Raises InvalidParameter for an unknown part."""
    if tags is None:
        return Wake(PARTS)
    asked: frozenset[Any] = frozenset(tags) if isinstance(tags, list | tuple | set | frozenset) else frozenset()
    if not asked or not asked <= PARTS:
        raise InvalidParameter(
            f"tags must be a list of {' and '.join(map(repr, get_args(ResidentPart)))}, or None for both (given: "
            f"{tags!r}).",
            "tags",
        )
    return Wake(asked)
