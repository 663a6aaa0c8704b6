"""Checkpoints whose tokenizer is vocab.json and merges.txt, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models, pre_tokenizers, trainers

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world, it's 1234 o'clock.", "  two  spaces\n\n\tand a tab ", "Grüße aus Köln. 你好，世界。🙂", "",
    "e\u0301 is composed", "<|im_start|>user\nHi<|im_end|>", "IT'S </s> here", "    return x + 12345\r\n",
]  # fmt: skip
SPECIAL = {str(300 + index): {"content": token, "special": True} for index, token in enumerate(("<|a|>", "<|im_end|>"))}

SETTINGS: dict[str, dict[str, Any]] = {
    "OPT": {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"),
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_prefix_space": False,
    },
    "GPT-2": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, "eos_token": "</s>"},
    "Qwen2": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": SPECIAL},
}


def write_files(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = HubTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    assert tokenizer.get_vocab_size() == 300
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "opt"}))
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_files(tmp_path / "model", SETTINGS[name])
    oracle: Any = getattr(transformers, SETTINGS[name]["tokenizer_class"].removesuffix("Fast")).from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle(text)["input_ids"], text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer.eos_token_id == oracle.eos_token_id


def test_a_tokenizer_json_counts_before_them(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "model", SETTINGS["GPT-2"])
    HubTokenizer(models.BPE(vocab={"x": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).vocab_size == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "RobertaTokenizer"}', "words of a 'RobertaTokenizer'"),
        ("vocab.json", '{"a": 0, "b": 2}', "number its tokens"),
        ("vocab.json", '{"a": "x"}', "number its tokens"),
        ("merges.txt", "a b c\n", "not two tokens"),
        ("merges.txt", "#version: 0.2\nĠ 你\n", "does not fit vocab.json"),
        ("merges.txt", None, "Cannot read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    folder = write_files(tmp_path / "model", SETTINGS["GPT-2"])
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(InvalidCheckpoint, match=says):
        Tokenizer.from_folder(folder)


def test_added_tokens_follow_the_vocabulary(tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"400": {"content": "<|a|>", "special": True}}}
    folder = write_files(tmp_path / "model", {**SETTINGS["GPT-2"], **added})
    with pytest.raises(InvalidCheckpoint, match=r"'<\|a\|>' the id 400"):
        Tokenizer.from_folder(folder)
