"""A small fault that a test should notice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    file: str
    """Under `asyncllm/`."""
    fragment: str
    """Occurs in the file exactly once."""
    replacement: str
    breaks: str
    """What goes wrong by it."""
    survives_because: str = ""
    """Why no test can tell it from the original, if none can."""


def mutants(file: str, *rows: tuple[str, str, str] | tuple[str, str, str, str]) -> tuple[Mutant, ...]:
    """Those of one file: (fragment, replacement, what goes wrong[, why it survives])."""
    return tuple(Mutant(file, *row) for row in rows)
