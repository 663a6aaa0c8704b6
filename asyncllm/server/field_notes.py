"""What is written under a Struct's fields in its source, for the documentation."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

__all__ = ["field_notes"]


def field_notes(kind: type[Any]) -> dict[str, str]:
    """By field, the strings that follow the fields of a class and its bases; none where the source is not there."""
    notes: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, note in pairwise(body):
            match field, note:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    notes[name] = " ".join(text.split())
    return notes
