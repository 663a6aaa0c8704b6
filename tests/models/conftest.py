"""Holds for every test of a model: one event loop is enough, the one that users have."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}
