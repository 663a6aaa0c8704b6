"""Check the JSON schemas of answers: their size, and the grammar library's limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from asyncllm.config.structured_output.prepared_schema import prepared_schema
from asyncllm.config.structured_output.schema_cases import with_cases
from asyncllm.errors import InvalidParameter

__all__ = ["MAX_CHOICES", "MAX_SCHEMA", "checked_schema"]

MAX_SCHEMA = 64 * 1024
MAX_LITERAL = 4096
MAX_CHOICES = 5000
MAX_PARTS = 20_000
MAX_DEPTH = 100
MAX_OPTIONAL = 1000
"""Limits of a schema. Beyond them compiling or using it takes seconds."""
MAX_BITS = 1024
"""Maximum size of a whole number; floats are no larger."""
MAX_MULTIPLE = 20_000
"""Limit of `multipleOf`, and of the least common multiple of several that apply to one number. 999,983 takes 10 s and
370 MB."""


def checked_schema(schema: object, field: str) -> Any:
    """Return a schema, which may be given as text, prepared for a grammar. Raises InvalidParameter."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA:
            raise _too_large(f"{len(schema)} characters", field)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidParameter(
                f"The schema of {field} is a text that is not JSON. Send an object.", field
            ) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        raise InvalidParameter(f"{field} has no schema. A JSON schema is an object.", field)
    multiples: list[Decimal] = []
    joined = False
    for part in _parts(schema, field):
        _check_part(part, field)
        if isinstance(part, Mapping):
            multiple = part.get("multipleOf")
            counts = isinstance(multiple, int | float) and multiple > 0 and multiple < math.inf
            multiples += [Decimal(repr(multiple))] if counts else []
            joined |= "allOf" in part or ("$ref" in part and counts)
    for together in (multiples,) if joined else [[each] for each in multiples]:
        _check_multiples(together, field)
    prepared = prepared_schema(with_cases(schema))
    size = len(json.dumps(prepared, ensure_ascii=False))
    if size > MAX_SCHEMA:
        raise _too_large(f"{size} characters", field)
    return prepared


def _check_multiples(multiples: list[Decimal], field: str) -> None:
    """Raise InvalidParameter if checking that a number is a multiple of all of them takes too long."""
    digits = max((-int(each.as_tuple().exponent) for each in multiples), default=0)
    common = 1
    for each in multiples:
        common = math.lcm(common, int(each.scaleb(max(digits, 0))))
        # Multiples of a power of ten are recognized by their last digits.
        if common > MAX_MULTIPLE and str(common).rstrip("0") != "1":
            raise _too_large(f"a multipleOf that comes to {str(common)[:32]}", field)


def _too_large(what: str, field: str) -> InvalidParameter:
    return InvalidParameter(
        f"The schema of {field} has {what}, which is too much for a grammar. Simplify it, or split the request.",
        field,
    )


def _parts(schema: Any, field: str) -> Iterator[Any]:
    """Yield every value in a schema, without recursion. Raises InvalidParameter if there are too many or they are
    nested too deeply."""
    left = [(schema, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise _too_large(f"more than {MAX_DEPTH} levels", field)
        if count + len(left) > MAX_PARTS:
            raise _too_large(f"more than {MAX_PARTS} parts", field)
        yield value
        if isinstance(value, Mapping):
            left.extend((each, depth + 1) for each in value.values())
        elif isinstance(value, list | tuple):
            left.extend((each, depth + 1) for each in value)


def _check_part(part: Any, field: str) -> None:
    if isinstance(part, str) and len(part) > MAX_LITERAL:
        raise _too_large(f"a text of {len(part)} characters", field)
    if isinstance(part, int) and part.bit_length() > MAX_BITS:
        raise _too_large("a number of more than 300 digits", field)
    if isinstance(part, list) and len(part) > MAX_CHOICES:
        raise _too_large(f"a list of {len(part)} entries", field)
    if isinstance(part, Mapping):
        if not all(isinstance(name, str) for name in part):
            raise InvalidParameter(f"The schema of {field} has a key that is not a text. JSON's keys are texts.", field)
        reference = part.get("$ref")
        if isinstance(reference, str) and isinstance(part.get("$id"), str) and not reference.startswith("#"):
            raise InvalidParameter(
                f"The schema of {field} has a $ref beside an $id, which drafts up to 7 resolve otherwise than later "
                f"ones. Let the $ref begin with '#', or leave the $id out.",
                field,
            )
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            optional = len(properties) - (len(required) if isinstance(required, list) else 0)
            if optional > MAX_OPTIONAL:
                raise _too_large(f"{optional} optional properties", field)
