"""hf_overrides of vision-language models: those that neither the model nor its image processor reads are refused, and
those of entries that count never are."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.models.registry import read_config
from asyncllm.models.unread_overrides import refuse_unread
from asyncllm.vl.processor import open_processor
from tests.vl.checkpoints import ALL_KINDS, folder_of

PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "vision_config", "projector_config")
NAMES_THE_FAMILY = ("architectures", "model_type")
MOVED = {("kimi_k25", "tie_word_embeddings")}
"""Entries of the whole that without one are the decoder's."""


def reading(folder: Path, fields: dict[str, Any], overrides: dict[str, Any] | None = None) -> Any:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config, processor = read_config(folder, hf_overrides=overrides), open_processor(folder, overrides)
    refuse_unread(folder, hf_overrides=overrides)
    return config, {name: each for name, each in vars(processor).items() if isinstance(each, int | float | str)}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_overrides_that_nothing_reads_are_refused_and_no_others(kind: str, tmp_path: Path) -> None:
    folder = copytree(folder_of(kind), tmp_path / "model", ignore=ignore_patterns("*.safetensors"))
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = reading(folder, fields)
    for part in (None, *(name for name in PARTS if isinstance(fields.get(name), dict))):
        with pytest.raises(InvalidParameter, match="nothing reads an entry 'patch_sizes'") as caught:
            reading(folder, fields, {"patch_sizes": 4} if part is None else {part: {"patch_sizes": 4}})
        assert caught.value.param == "hf_overrides"
        entries = fields if part is None else fields[part]
        for name, value in entries.items():
            if name in NAMES_THE_FAMILY or isinstance(value, dict) or (kind, name) in MOVED:
                continue
            others = {key: each for key, each in entries.items() if key != name}
            file = others if part is None else {**fields, part: others}
            try:
                counts = reading(folder, file) != whole
            except ModelError:
                counts = True
            if counts:
                given = {name: value} if part is None else {part: {name: value}}
                assert reading(folder, file, given) == whole, (part, name)
