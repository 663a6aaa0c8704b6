"""Tokenizers that programs open by the name of a model, and the calls of LMDeploy's."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import asyncllm
from asyncllm.locate import locate
from asyncllm.text import tokenizer as text
from asyncllm.tokenizer import Tokenizer

PROMPT = "<|im_start|>Hello, 世界"


@pytest.fixture(scope="module")
def opened() -> Tokenizer:
    return Tokenizer("tiny-chat", trust_remote_code=True)


def test_a_name_and_a_folder(opened: Tokenizer, tmp_path: Path) -> None:
    assert asyncllm.Tokenizer is Tokenizer
    known = text.Tokenizer.from_folder(locate("tiny-chat"))
    assert isinstance(opened, text.Tokenizer)
    assert opened.encode(PROMPT) == known.encode(PROMPT)
    shutil.copy(locate("tiny-chat") / "tokenizer.json", tmp_path)
    assert Tokenizer(tmp_path).encode(PROMPT, add_bos=False) == known.encode(PROMPT, add_bos=False)
    with pytest.raises(asyncllm.ModelNotFound):
        Tokenizer(tmp_path / "nowhere")


def test_what_begins_a_text(opened: Tokenizer) -> None:
    ids = opened.encode(PROMPT)
    assert ids[0] == opened.bos_token_id
    assert opened.encode(PROMPT, False) == opened.encode(PROMPT, add_special_tokens=False) == ids[1:]
    assert opened.encode(PROMPT, literal_spans=[(0, 5)], add_special_tokens=False)[0] != opened.bos_token_id


def test_texts_and_ids(opened: Tokenizer) -> None:
    ids = opened.encode(PROMPT)
    assert opened(PROMPT).input_ids == ids
    assert opened([PROMPT, "x"]).input_ids == [ids, opened.encode("x")]
    assert opened.decode(ids) == "Hello, 世界"
    assert opened.decode(ids, 1, False) == opened.decode(ids, offset=1, skip_special_tokens=False) == PROMPT
    assert opened.decode(ids, 2) == "Hello, 世界"


def test_the_vocabulary(opened: Tokenizer) -> None:
    vocabulary = opened.get_vocab()
    assert vocabulary["<|im_end|>"] == opened.eos_token_id == opened.eos_token_ids[0]
    assert all(opened.token_id(token) == id_ for token, id_ in vocabulary.items())
    assert max(vocabulary.values()) < opened.vocab_size


def test_an_engine_has_one(opened: Tokenizer) -> None:
    with asyncllm.pipeline("tiny-chat") as pipe:
        assert isinstance(pipe.tokenizer, asyncllm.Tokenizer)
        assert pipe.tokenizer.encode(PROMPT) == opened.encode(PROMPT)


def test_weights_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = ModuleType("huggingface_hub")
    calls: list[dict[str, Any]] = []

    def download(repo_id: str, **arguments: Any) -> str:
        calls.append({"repo_id": repo_id, **arguments})
        return str(locate("tiny-chat"))

    hub.snapshot_download, hub.errors = download, None
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert Tokenizer("owner/name").encode("x")
    (call,) = calls
    assert call["repo_id"] == "owner/name"
    assert "*.safetensors" in call["ignore_patterns"]
