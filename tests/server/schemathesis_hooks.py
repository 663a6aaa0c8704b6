"""What Schemathesis makes of JSON Schema that is not so here; loaded by test_schemathesis.py."""

from __future__ import annotations

from typing import Any

import schemathesis

__all__ = ["map_body"]


def _as_meant(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_as_meant(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_meant(each) for name, each in value.items()}
    return value


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """7.0 is an integer to JSON Schema, and a float to a reader that has both."""
    return _as_meant(body)
