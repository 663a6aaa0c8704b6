"""Files of tiktoken and tekken.json against tiktoken's rule, written out here: words, joined by lowest rank."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tokenizers.token_table import byte_level_piece
from tests.text.checkpoints import SENTENCES, byte_level, write_json

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = "|".join(
    (
        r"(?V1)[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{HAN[0]}*{HAN[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{HAN[0]}+{HAN[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
PATTERNS = {
    "qwen.tiktoken": QWEN,
    "hy.tiktoken": QWEN,
    "tiktoken.model": KIMI,
    "tokenizer.model": QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
}
COMPOSED = {"qwen.tiktoken", "hy.tiktoken"}
GLM_TOKENS = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|user|>", "<|assistant|>")
PROBES = (
    *SENTENCES[:4],
    "I'LL don't 12345 x  y\n\n  z\r\n a_b",
    "CamelCase中文ABCdef é e\u0301 \u0301x",
    " " * 9,
    "aaaaaaaaaaa thethethe",
    "😀👍🏽\x00",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, int]:
    folder = byte_level(tmp_path_factory.mktemp("trained"))
    vocabulary = HubTokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=False)
    tokens = [byte_level_piece(text) for text, id_ in sorted(vocabulary.items(), key=lambda pair: pair[1]) if id_ > 2]
    # Words that no two others make, as published files have some.
    tokens += [b"house beside", "里程碑".encode()]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def write(folder: Path, name: str, ranks: Mapping[bytes, int], **fields: Any) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / name).write_text("".join(lines))
    if name == "tokenizer.model":
        names = {str(len(ranks) + index): {"content": each, "special": True} for index, each in enumerate(GLM_TOKENS)}
        fields = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": names, **fields}
    write_json(folder / "tokenizer_config.json", **fields)
    return folder


def by_the_rule(text: str, ranks: Mapping[bytes, int], pattern: str) -> list[int]:
    ids = []
    for word in regex.findall(pattern, text):
        whole = word.encode()
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while True:
            joined = [(ranks[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not joined:
                break
            _, place = min(joined)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.mark.parametrize("name", PATTERNS)
def test_encodes_as_tiktoken_does(name: str, ranks: dict[bytes, int], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, name, ranks))
    texts = st.text(st.sampled_from("abtheAB'sSL 12\n\r中é_.,😀"), max_size=30) | st.text(
        st.characters(exclude_categories=["Cs", "Cn"]), max_size=12
    )

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        plain = unicodedata.normalize("NFC", text) if name in COMPOSED else text
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == by_the_rule(plain, ranks, PATTERNS[name])
        assert tokenizer.decode(ids) == plain

    for probe in PROBES:
        check.hypothesis.inner_test(probe)
    check()


def test_special_tokens_of_qwen(ranks: dict[bytes, int], tmp_path: Path) -> None:
    """By their names in its code, and Qwen-VL's behind them; nothing stands in front of a text."""
    tokenizer = Tokenizer.from_folder(write(tmp_path, "qwen.tiktoken", ranks, tokenizer_class="QWenTokenizer"))
    first = len(ranks)
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [first + 1, ranks[b"a"], first + 2]
    assert (tokenizer.token_id("<|extra_204|>"), tokenizer.vocab_size) == (first + 207, first + 208)
    assert tokenizer.token_id("<img>") is None
    (tmp_path / "config.json").write_text('{"visual": {}}')
    assert Tokenizer.from_folder(tmp_path).token_id("<img>") == first + 214


def test_special_tokens_of_kimi(ranks: dict[bytes, int], tmp_path: Path) -> None:
    """256 of them, with the names that the file gives them."""
    first = len(ranks)
    named = {first: ("[BOS]", True), first + 2: ("<|tool_call_begin|>", False)}
    added = {str(id_): {"content": text, "special": special} for id_, (text, special) in named.items()}
    tokenizer = Tokenizer.from_folder(write(tmp_path, "tiktoken.model", ranks, added_tokens_decoder=added))
    assert tokenizer.encode("[BOS]<|tool_call_begin|>") == [first, first + 2]
    assert tokenizer.special_token_ids == set(range(first, first + 256)) - {first + 2}
    assert tokenizer.token_text(first + 1) == f"<|reserved_token_{first + 1}|>"
    assert tokenizer.vocab_size == first + 256


def test_what_stands_in_front_of_texts(ranks: dict[bytes, int], tmp_path: Path) -> None:
    """Two tokens of GLM-4's, once; that of Hunyuan unless the checkpoint says otherwise."""
    glm, hunyuan = tmp_path / "glm", tmp_path / "hunyuan"
    glm.mkdir()
    hunyuan.mkdir()
    tokenizer = Tokenizer.from_folder(write(glm, "tokenizer.model", ranks, eos_token="<|endoftext|>"))
    first, a = len(ranks), ranks[b"a"]
    assert tokenizer.encode("a") == tokenizer.encode("[gMASK]<sop>a") == [first + 2, first + 4, a]
    assert tokenizer.eos_token_ids == (first,)
    assert Tokenizer.from_folder(write(hunyuan, "hy.tiktoken", ranks)).encode("a") == [first + 1, a]
    settings = {"bos_token": "<|startoftext|>", "add_bos_token": False}
    assert Tokenizer.from_folder(write(hunyuan, "hy.tiktoken", ranks, **settings)).encode("a") == [a]


@pytest.mark.parametrize(
    "text", ["YQ== 0\nYg==\n", "YQ== 0\nYg== 2\n", "YQ== 0\nYQ== 1\n", "?? 0\n", "YQ== 0\n = 1\n", "", "\xff 1"]
)
def test_damaged_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidCheckpoint, match=r"qwen\.tiktoken.*download it again"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("id_", "text", "named"), [(10**7, "<x>", "<x>"), (300, "<|endoftext|>", "named twice"), (300, "a", "already")]
)
def test_damaged_names(id_: int, text: str, named: str, tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    added = {str(id_): {"content": text, "special": True}}
    with pytest.raises(InvalidCheckpoint, match=named):
        Tokenizer.from_folder(write(tmp_path, "qwen.tiktoken", ranks, added_tokens_decoder=added))


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern that Mistral's files hold."""


def write_tekken(folder: Path, ranks: Mapping[bytes, int], *, special: int = 30, **changes: Any) -> Path:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in [*ranks.items(), (b"one too many", len(ranks))]
    ]
    sizes = {"default_vocab_size": special + len(ranks), "default_num_special_tokens": special}
    fields = {"config": {"pattern": TEKKEN, **sizes, "version": "v7"}, "vocab": vocabulary, **changes}
    (folder / "tekken.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def test_tekken_encodes_by_its_pattern(ranks: dict[bytes, int], tmp_path: Path) -> None:
    """Special tokens come first, and the vocabulary ends where the model's does."""
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path, ranks))
    for probe in PROBES:
        ids = tokenizer.encode(probe, add_bos=False)
        assert ids == [30 + id_ for id_ in by_the_rule(probe, ranks, TEKKEN)]
        assert tokenizer.decode(ids) == probe
    a = 30 + ranks[b"a"]
    assert tokenizer.encode("a") == tokenizer.encode("<s>a") == [1, a]
    assert tokenizer.encode("[INST]a[/INST]") == [1, 3, a, 4]
    assert tokenizer.encode("[SYSTEM_PROMPT]a</s>", add_bos=False) == [17, a, 2]
    assert 3 not in tokenizer.encode("[INST]", parse_special=False)
    assert tokenizer.special_token_ids == set(range(30))
    assert (tokenizer.vocab_size, tokenizer.token_text(29)) == (30 + len(ranks), "<SPECIAL_29>")


def test_names_of_tekken(ranks: dict[bytes, int], tmp_path: Path) -> None:
    names = [{"rank": rank, "token_str": text} for rank, text in {0: "<unk>", 1: "<s>", 5: "[THINK]"}.items()]
    tokenizer = Tokenizer.from_folder(write_tekken(tmp_path, ranks, special_tokens=names))
    assert tokenizer.encode("[THINK]") == [1, 5]
    assert tokenizer.token_id("[INST]") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab": []},
        {"vocab": 3},
        {"config": {}},
        {"special_tokens": [{"rank": 30, "token_str": "x"}]},
        {"special_tokens": [{"rank": 1, "token_str": "a"}]},
        {"special_tokens": [{"rank": 1}]},
        {"config": {"pattern": "(", "default_vocab_size": 286, "default_num_special_tokens": 30}},
    ],
)
def test_damaged_tekken(changes: dict[str, Any], tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    with pytest.raises(InvalidCheckpoint, match=r"tekken\.json.*download (it|them) again"):
        Tokenizer.from_folder(write_tekken(tmp_path, ranks, **changes))
