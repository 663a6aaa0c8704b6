"""One kind of event loop is enough here: what these tests prove lies below it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})
