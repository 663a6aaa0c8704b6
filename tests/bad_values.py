"""Values that a setting must not accept, worked out from its declared type and bounds. Used by test_bad_input.py."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

__all__ = ["Stranger", "bad_values"]


class Stranger:
    """Of no type that anything takes. Its name is the same in every process, as test workers need it."""

    def __repr__(self) -> str:
        return "Stranger()"


OTHERS: dict[type, list[Any]] = {
    int: ["7", 1.5, [1], {}, b"1", True, Stranger()],
    float: ["0.5", [0.5], {}, True, 1j],
    str: [5, 1.5, b"text", ["text"], {}, True],
    bool: [1, 0, "yes", [], 2.0],
    list: ["text", 5, {"a": 1}, True],
    dict: ["text", 5, ["a"], True],
}
"""Type -> values of other types."""


def bad_values(config: type[msgspec.Struct]) -> Iterator[tuple[str, Any]]:
    """(field, value) for every kind of wrong value that the field's declaration rules out."""
    for name, annotation in typing.get_type_hints(config, include_extras=True).items():
        if name not in config.__struct_fields__:
            continue
        inner, meta = _parts(annotation)
        members = typing.get_args(inner) if _is_union(inner) else (inner,)
        kind, kind_meta = _parts(next(member for member in members if member is not type(None)))
        if type(None) not in members:
            yield name, None
        for value in _of_other_type(kind):
            yield name, value
        for value in _out_of_bounds(kind, meta or kind_meta):
            yield name, value
        for value in _with_bad_items(kind):
            yield name, value


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _parts(annotation: Any) -> tuple[Any, msgspec.Meta | None]:
    if typing.get_origin(annotation) is Annotated:
        inner, *extra = typing.get_args(annotation)
        return inner, next((each for each in extra if isinstance(each, msgspec.Meta)), None)
    return annotation, None


def _of_other_type(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is Literal:
        yield from ("no such choice", 3.5, [], -77)
    else:
        yield from OTHERS.get(typing.get_origin(kind) or kind, [])


def _out_of_bounds(kind: Any, meta: msgspec.Meta | None) -> Iterator[Any]:
    if meta is not None:
        step = 1 if kind is int else 0.001
        for bound, beyond in ((meta.ge, -step), (meta.le, step), (meta.gt, 0), (meta.lt, 0)):
            if bound is not None:
                yield kind(bound + beyond)
    if kind is float:
        yield from (math.nan, math.inf, -math.inf)
    if kind is int:
        yield from (-1 - 2**63, 10**25)


def _with_bad_items(kind: Any) -> Iterator[Any]:
    arguments = [_parts(each)[0] for each in typing.get_args(kind)]
    if typing.get_origin(kind) is list:
        for value in OTHERS[typing.get_origin(arguments[0]) or arguments[0]][:3]:
            yield [value]
    if typing.get_origin(kind) is dict:
        for key in OTHERS[arguments[0]][:2]:
            if isinstance(key, typing.Hashable):
                yield {key: 1.0}
        if arguments[1] in OTHERS:
            key = 1 if arguments[0] is int else "a"
            for value in OTHERS[arguments[1]][:3]:
                yield {key: value}
