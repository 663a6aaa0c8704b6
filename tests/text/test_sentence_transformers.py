"""modules.json and 1_Pooling/config.json: what is honoured, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm.engine.requests.pooling import EmbeddingForm
from asyncllm.errors import InvalidCheckpoint, UnsupportedFeature
from asyncllm.text.sentence_transformers import EmbeddingDefaults

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def flags(*modes: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 64, **{f"pooling_mode_{mode}": mode in modes for mode in MODES}}


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {
            "idx": index,
            "name": str(index),
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]


def read(folder: Path, listed: Any, pooling: Any = None) -> EmbeddingDefaults:
    if listed is not None:
        (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    return EmbeddingDefaults.read(folder)


ALL = modules("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("listed", "settings", "pooling", "normalize"),
    [
        (None, None, "last", True),
        (ALL, flags("lasttoken"), "last", True),
        (ALL, flags("mean_tokens"), "mean", True),
        (ALL[:2], flags("mean_tokens"), "mean", False),
        (None, flags("mean_tokens"), "mean", True),
        (ALL, {"pooling_mode": "lasttoken"}, "last", True),
        (ALL, {"pooling_mode": ["mean"]}, "mean", True),
        (ALL, {"word_embedding_dimension": 64}, "mean", True),
        (modules("Transformer"), None, "last", False),
    ],
)
def test_what_the_files_say(tmp_path: Path, listed: Any, settings: Any, pooling: str, normalize: bool) -> None:
    found = read(tmp_path, listed, settings)
    assert (found.pooling, found.normalize, found.refused) == (pooling, normalize, "")


@pytest.mark.parametrize(
    ("listed", "settings", "named"),
    [
        (ALL, flags("max_tokens"), "max_tokens"),
        (ALL, flags("cls_token"), "cls_token"),
        (ALL, flags("mean_tokens", "max_tokens"), "'mean_tokens' and 'max_tokens'"),
        (ALL, flags(), "pooling"),
        (ALL, {"pooling_mode": "weightedmean"}, "weightedmean"),
        (ALL, {"pooling_mode": {"mean": True}}, "mean"),
        (ALL, None, "is missing"),
        (modules("Transformer", "Pooling", "Dense", "Normalize"), flags("mean_tokens"), "Dense"),
    ],
)
def test_what_is_not_implemented_is_refused_unless_the_caller_chooses(
    tmp_path: Path, listed: Any, settings: Any, named: str
) -> None:
    found = read(tmp_path, listed, settings)
    with pytest.raises(UnsupportedFeature, match=named) as caught:
        EmbeddingForm(None, None, None, 64, found)
    assert caught.value.param == "pooling"
    assert EmbeddingForm("mean", None, None, 64, found).pooling == "mean"


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"{}",
        b"[1]",
        b"\xff",
        b'[{"type": "a.Pooling", "path": "../secret"}]',
        b'[{"type": "a.Pooling", "path": "/etc"}]',
        b'[{"type": "a.Pooling", "path": "a\\u0000b"}]',
        b'[{"type": "a.Pooling"}]',
        b'[{"path": "1_Pooling"}]',
        b"[" * 100_000,
    ],
)
def test_a_damaged_list_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "modules.json").write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=r"modules\.json"):
        EmbeddingDefaults.read(tmp_path)


@pytest.mark.parametrize("settings", [[], "x", 3])
def test_damaged_settings_are_refused(tmp_path: Path, settings: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match="1_Pooling"):
        read(tmp_path, ALL, settings)
