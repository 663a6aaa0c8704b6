"""What compiles kernels is started once for all files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels import offline


@pytest.fixture(scope="session")
def compile_kernels() -> Iterator[offline.Compile]:
    with offline.compiler() as compile_module:
        yield compile_module
