"""hf_overrides: those that nothing reads are refused, and those of entries that count never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.models.config import ModelConfig
from asyncllm.models.registry import families
from asyncllm.models.unread_overrides import refuse_unread
from tests.models import test_config
from tests.models.test_config import ABSENT, tiny


def read(tmp_path: Path, *fields: Any, **options: Any) -> ModelConfig:
    config = test_config.read(tmp_path, *fields, **options)
    refuse_unread(tmp_path, **options)
    return config


def test_overrides_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    for name in ("rope_thetas", "sliding_windows", "max_window_layers"):
        with pytest.raises(InvalidParameter, match=f"nothing reads an entry '{name}'") as caught:
            read(tmp_path, {}, hf_overrides={name: 4})
        assert caught.value.param == "hf_overrides"
    # Entries of the file itself, those that are read with a default, and those that are moved.
    assert read(tmp_path, {"use_cache": True}, hf_overrides={"use_cache": False}) == read(tmp_path, {})
    for name, value in (("head_dim", 24), ("rope_theta", 7e4), ("torch_dtype", "bfloat16")):
        assert read(tmp_path, {}, hf_overrides={name: value}) != read(tmp_path, {})


@pytest.mark.parametrize("architecture", {family: name for name, family in families().items()}.values())
def test_entries_that_count_may_be_overrides_alone(tmp_path: Path, architecture: str) -> None:
    fields = tiny(architecture)
    whole = read(tmp_path, {}, fields)
    for name in fields.keys() - {"architectures"}:
        try:
            counts = read(tmp_path, {name: ABSENT}, fields) != whole
        except ModelError:
            counts = True
        if counts:
            assert read(tmp_path, {name: ABSENT}, fields, hf_overrides={name: fields[name]}) == whole, name
