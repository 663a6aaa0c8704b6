"""Read the docstrings of a Struct's fields from its source, for the API documentation."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Any

__all__ = ["field_notes"]


def field_notes(kind: type[Any]) -> dict[str, str]:
    """Return field -> the string that follows it in the source of the class and its bases; empty without the source."""
    notes: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("asyncllm."):
            notes |= _notes_in(base.__module__).get(base.__name__, {})
    return notes


@cache
def _notes_in(module: str) -> dict[str, dict[str, str]]:
    """Return the notes of a module by class and field."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    return {node.name: _notes_of(node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _notes_of(definition: ast.ClassDef) -> dict[str, str]:
    notes = {}
    for field, note in pairwise(definition.body):
        match field, note:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                notes[name] = " ".join(text.split())
    return notes
