from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from asyncllm.text.tokenizer import Tokenizer
from tests.text.checkpoints import BUILDERS


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a builder -> its folder, trained once per test run. Not to be written to."""
    return cache(lambda name: BUILDERS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def tokenizer_of(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Name of a builder -> its tokenizer, opened once per test run."""
    return cache(lambda name: Tokenizer.from_folder(folder_of(name)))
