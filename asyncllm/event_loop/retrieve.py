"""Errors of futures and tasks that no caller awaits.

asyncio logs an error that nobody has retrieved when its future is freed. Futures are left behind for good reason when
their callers were cancelled, or when the engine has ended and has told its callers another error.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["retrieve"]


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future that is done, if it has one, as retrieved. Also serves as a done callback."""
    if not future.cancelled():
        future.exception()
