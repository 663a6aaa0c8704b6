"""Finds which of many patterns a dotted name begins with, segment by segment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["PLACEHOLDER", "NameTree", "tree_of", "walk"]

PLACEHOLDER = re.compile(r"\{([a-z]\w*)\}")

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

NameTree = dict[str | None, Any]
"""The result of `tree_of`."""


def tree_of(patterns: Iterable[tuple[str, Any]]) -> NameTree:
    """Return patterns as nested dicts by segment: None stands for a number, and "" holds (value, placeholder names).

    Raises ValueError for a pattern that is not a dotted name.
    """
    root: NameTree = {}
    for pattern, value in patterns:
        node = root
        names: list[str] = []
        for segment in pattern.split("."):
            key: str | None = segment
            placeholder = PLACEHOLDER.fullmatch(segment)
            if not segment or (placeholder is None and "{" in segment):
                raise ValueError(f"weight table: {pattern!r} is not a dotted name with {{i}} placeholders")
            if placeholder is not None:
                names.append(placeholder[1])
                key = None
            node = node.setdefault(key, {})
        if "" in node or len(set(names)) < len(names):
            raise ValueError(f"weight table: {pattern!r} is ambiguous")
        node[""] = (value, tuple(names))
    return root


def walk(tree: NameTree, segments: list[str]) -> list[tuple[int, Any, dict[str, int]]]:
    """Return every pattern that matches the leading segments: (number of segments, its value, the placeholders'
    numbers)."""
    found = []
    states: list[tuple[NameTree, tuple[int, ...]]] = [(tree, ())]
    for depth, segment in enumerate(segments, start=1):
        following = [(node[segment], numbers) for node, numbers in states if segment and segment in node]
        if _INDEX.fullmatch(segment):
            following += [(node[None], (*numbers, int(segment))) for node, numbers in states if None in node]
        for node, numbers in following:
            if "" in node:
                value, names = node[""]
                found.append((depth, value, dict(zip(names, numbers, strict=True))))
        states = following
    return found
