"""Errors of futures and tasks that no caller awaits.

asyncio logs an error that was never retrieved when its future is freed. The callers of a future may have been
cancelled, or may have got another error when the engine ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["retrieve"]


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future that is done, if it has one, as retrieved.

    As a done callback it does so for a future that no caller may await any more.
    """
    if not future.cancelled():
        future.exception()
