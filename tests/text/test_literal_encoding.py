"""A spelling that is plain text changes nothing around it, and never becomes a special token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.config import ChatTemplateConfig
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.checkpoint_files import AddedToken
from asyncllm.text.literals import Literals
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tokenizers.added_tokens import Spellings, TokenFinder, any_of
from asyncllm.text.tokenizers.sentencepiece_file import WITHOUT_DUMMY_PREFIX
from tests.text.checkpoints import BUILDERS, sentencepiece_model, write_json

A, B = "<|a|>", "<|b|>"
"""A is a special token of all tokenizers here, B of those that `with_tokens` is asked for."""

texts = st.lists(
    st.sampled_from(
        [A, B, "the", " fox", "Hello", " ", "  ", "\n", "a", "<|", "|>", "<tool call>", "你", "😀", "</s>"]
    ),
    max_size=9,
).map("".join)


def with_tokens(source: Path, folder: Path, name: str, *contents: str, **flags: Any) -> Path:
    """A copy of a builder's tokenizer, with special tokens added behind its vocabulary."""
    base, _, variant = name.partition(" ")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if base.startswith("sentencepiece"):
        config = folder / "tokenizer_config.json"
        fields = json.loads(config.read_text()) if config.exists() else {}
        numbered = {
            str(420 + index): {"content": content, "special": True, **flags} for index, content in enumerate(contents)
        }
        fields["added_tokens_decoder"] = {**fields.get("added_tokens_decoder", {}), **numbered}
        write_json(config, **{**fields, "legacy": variant != "not legacy"})
        return folder
    description = json.loads((folder / "tokenizer.json").read_text())
    if variant == "first":
        description["pre_tokenizer"]["prepend_scheme"] = "first"
    if variant == "unsplit":
        description["normalizer"] = None
        description["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False
        }  # fmt: skip
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    for id_, content in enumerate(contents, size):
        description["added_tokens"].append({"id": id_, "content": content, **plain, **flags})
    write_json(folder / "tokenizer.json", **description)
    return folder


KINDS = [
    "byte_level", "byte_fallback", "byte_fallback unsplit", "metaspace", "metaspace first", "word_piece",
    "sentencepiece_bpe", "sentencepiece_bpe not legacy", "sentencepiece_unigram",
]  # fmt: skip
FLAGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "strip": {"lstrip": True, "rstrip": True},
    "normalized": {"normalized": True},
}


@pytest.fixture(scope="module")
def make(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[Path, Tokenizer]]]:
    @cache
    def build(name: str, flags: str, *contents: str) -> tuple[Path, Tokenizer]:
        source = folder_of(name.partition(" ")[0])
        folder = with_tokens(source, tmp_path_factory.mktemp("t"), name, *contents, **FLAGS[flags])
        return folder, Tokenizer.from_folder(folder)

    return build


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", KINDS)
def test_everything_around_a_literal_is_encoded_as_ever(
    make: Callable[..., tuple[Path, Tokenizer]], name: str, flags: str
) -> None:
    tokenizer = make(name, flags, A, B)[1]
    without_b = make(name, flags, A)[1]
    special = tokenizer.token_id(B)

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        # As if there were no B.
        spans = [match.span() for match in any_of([B]).finditer(text)]
        ids = tokenizer.encode(text, add_bos=False, literal_spans=spans)
        assert special not in ids
        assert ids == without_b.encode(text, add_bos=False)
        # A place that holds nothing.
        assert tokenizer.encode(text, literal_spans=[(0, 0)]) == tokenizer.encode(text)

    check()


@pytest.mark.parametrize("name", [kind for kind in KINDS if not kind.startswith("sentencepiece")])
def test_one_literal_leaves_the_other_tokens_to_transformers(
    make: Callable[..., tuple[Path, Tokenizer]], name: str
) -> None:
    tokenizer = make(name, "plain", A, B)[1]
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(make(name, "plain", A)[0])
    text = f"{A}the fox {B} the{A} fox{A}\n{B}{A}"
    spans = [match.span() for match in any_of([B]).finditer(text)]
    assert (
        tokenizer.encode(text, add_bos=False, literal_spans=spans) == oracle(text, add_special_tokens=False).input_ids
    )


@pytest.mark.parametrize("name", KINDS)
def test_no_literal_becomes_a_special_token(make: Callable[..., tuple[Path, Tokenizer]], name: str) -> None:
    tokenizer = make(name, "plain", A, B)[1]
    unknown = {tokenizer.token_id(token) for token in ("<unk>", "[UNK]")}
    for spelling in tokenizer.spellings.pattern.findall(f"<unk> <s> </s> [CLS] [SEP] <|im_end|> {A} {B}"):
        text = f"x {spelling}{spelling} {spelling}"
        spans = [match.span() for match in tokenizer.spellings.pattern.finditer(text)]
        for ids in (tokenizer.encode(text, literal_spans=spans), tokenizer.encode(text, parse_special=False)):
            assert set(ids[len(tokenizer.encode("")) :]) & tokenizer.special_token_ids <= unknown


def test_pieces_that_sentencepiece_defines_for_its_user_are_no_special_tokens_in_a_literal(tmp_path: Path) -> None:
    model = sentencepiece_model("bpe", user_defined_symbols=["<turn>", "<plain>"], remove_extra_whitespaces=False)
    (tmp_path / "tokenizer.model").write_bytes(model)
    write_json(tmp_path / "tokenizer_config.json", additional_special_tokens=["<turn>"])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    turn, plain = oracle.piece_to_id("<turn>"), oracle.piece_to_id("<plain>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert turn in tokenizer.encode("a <turn> b")
    for ids in (
        tokenizer.encode("a <turn><plain> b", literal_spans=[(2, 8)]),
        tokenizer.encode("a <turn><plain> b", parse_special=False),
    ):
        assert turn not in ids
        assert plain in ids
        assert tokenizer.decode(ids) == "a <turn><plain> b"


PIECES = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
INFILLED = [("def add(", ") + b"), ("the fox", " the dog\n"), (" a\n", "\nthe house"), ("the", "the")]


@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback unsplit", "sentencepiece_bpe"])
def test_code_llamas_infilling_pieces_are_found_behind_a_space(
    make: Callable[..., tuple[Path, Tokenizer]], name: str
) -> None:
    """As its paper has it (arXiv 2308.12950): the prefix as any text, the suffix without a space in front of it."""
    folder, tokenizer = make(name, "plain", *PIECES)
    before, behind, middle, end = (tokenizer.token_id(piece) for piece in PIECES)
    template = ChatTemplate.open(folder, ChatTemplateConfig(capability="infilling"))
    encode: Callable[[str], list[int]]
    if name == "sentencepiece_bpe":
        model = (folder / "tokenizer.model").read_bytes() + WITHOUT_DUMMY_PREFIX
        encode = sentencepiece.SentencePieceProcessor(model_proto=model).encode
    else:
        bare = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        bare.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        bare.pre_tokenizer = tokenizers.pre_tokenizers.Split("\0", "isolated")

        def encode(text: str) -> list[int]:
            return bare.encode(text, add_special_tokens=False).ids

    for prefix, suffix in INFILLED:
        text = template.render([{"role": "user", "content": f"{prefix}<FILL>{suffix}"}])
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == [before, *encode(f" {prefix}"), behind, *encode(suffix), middle]
    assert end in tokenizer.eos_token_ids
    assert tokenizer.encode("x <EOT>")[-1] == end
    # Who writes them in a message says nothing by it.
    literals = Literals(tokenizer)
    text, spans = literals.restore(f" {literals.mark_text('<PRE> x ▁<SUF> <MID>')}<EOT> <EOT>")
    ids = tokenizer.encode(text, literal_spans=spans)
    assert not {before, behind, middle} & set(ids)
    assert ids.count(end) == 1
    assert tokenizer.decode(tokenizer.encode("see <PRE>", parse_special=False)) == "see <PRE>"


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", KINDS)
def test_added_tokens_go_by_their_own_spelling(
    make: Callable[..., tuple[Path, Tokenizer]], name: str, flags: str
) -> None:
    tokenizer = make(name, flags, A, B)[1]
    for spelling in (A, B):
        assert spelling in tokenizer.spellings.pattern.findall(f"x{A}{B}")
        assert tokenizer.token_id(spelling) in tokenizer.special_token_ids
    assert (tokenizer.table is None) is (name == "word_piece")


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    folder = BUILDERS["byte_level"](tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text())
    moved = max(description["model"]["vocab"], key=description["model"]["vocab"].__getitem__)
    description["model"]["vocab"][moved] = 450
    description["added_tokens"][-1]["id"] = 460
    write_json(folder / "tokenizer.json", **description)
    tokenizer = Tokenizer.from_folder(folder)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = f"{moved.replace('Ġ', ' ')}<tool call><\uff5cwide\uff5c> the<|im_end|> fox"
    assert (
        tokenizer.encode(text, add_bos=False, literal_spans=[(0, 0)])
        == oracle.encode(text, add_special_tokens=False).ids
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=8), st.text("ab<|", max_size=20))
def test_spellings_are_found_the_longest_first(words: list[str], text: str) -> None:
    spellings = Spellings(words)
    found = [match[0] for match in spellings.pattern.finditer(text)]
    expected, start = [], 0
    while start < len(text):
        word = max((word for word in words if text.startswith(word, start)), key=len, default="")
        expected += [word] if word else []
        start += len(word) or 1
    assert found == expected
    begins = (place for place in range(len(text)) if any(word.startswith(text[place:]) for word in words))
    longest = max(map(len, words), default=0)
    assert spellings.open_end(text, 0) == next((place for place in begins if len(text) - place < longest), len(text))


def test_a_thousand_spellings_cost_as_much_as_one() -> None:
    assert any_of(f"<|reserved_{number}|>" for number in range(1000)).pattern.count("<") == 1
    assert any_of("a" * size for size in range(1, 400)).fullmatch("a" * 399)
    assert any_of([]).search("anything") is None


def test_white_space_that_a_token_takes_along_is_looked_through_once() -> None:
    token = AddedToken(A, rstrip=True)
    space = AddedToken("\n\n")
    finder = TokenFinder({7: token, 8: space}, frozenset({7, 8}), {})
    assert list(finder.find(f"\n\n{A} \n\n {A}x\n\n")) == [(0, 2, 8), (2, 11, 7), (11, 16, 7), (17, 19, 8)]

    class Text(str):
        """Counts the characters that slices of it copy."""

        copied = 0

        def __getitem__(self, key: Any) -> str:
            part = super().__getitem__(key)
            Text.copied += len(part)
            return part

    text = Text(f"{A} " * 2000)
    assert len(list(finder.find(text))) == 2000
    assert Text.copied < 4 * len(text)
