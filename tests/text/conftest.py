from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncllm.text.tokenizer import Tokenizer
from tests.text.checkpoints import BUILDERS, write_json


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a builder -> its folder, trained once per test run. Not to be written to."""
    return cache(lambda name: BUILDERS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def tokenizer_of(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Name of a builder -> its tokenizer, opened once per test run."""
    return cache(lambda name: Tokenizer.from_folder(folder_of(name)))


@pytest.fixture
def checkpoint(folder_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder with a tokenizer, and the given fields of tokenizer_config.json and config.json."""

    def write(config: dict[str, Any] | None = None, **fields: Any) -> Path:
        shutil.copy(folder_of("byte_level") / "tokenizer.json", tmp_path)
        tokens = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        write_json(tmp_path / "tokenizer_config.json", **{**tokens, **fields})
        if config is not None:
            write_json(tmp_path / "config.json", **config)
        return tmp_path

    return write
