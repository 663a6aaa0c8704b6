"""Encoding and decoding against `tokenizers`, `sentencepiece` and `transformers`; special ids; damaged files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import InvalidCheckpoint, InvalidMessage, InvalidParameter, ModelNotFound
from asyncllm.text.tokenizer import Tokenizer
from tests.text.checkpoints import BUILDERS, SENTENCES, sentencepiece_bpe, sentencepiece_model, write_json

FROM_JSON = ["byte_level", "byte_fallback", "metaspace", "word_piece"]
FROM_MODEL = ["sentencepiece_bpe", "sentencepiece_unigram"]
PROBES = [
    "", " ", "  ", "a", " a", "a ", "Hello world", "  two  spaces ", "line\nbreak\n\n", "\ttab", "42 + 17",
    "naïve café 你好 😀 привет", "zero\x00byte", "\ufeffmark", "x" * 300, *SENTENCES[:4],
]  # fmt: skip

texts = st.text(st.sampled_from("ab hello\n 你😀é<|>/s"), max_size=30) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=10
)


@pytest.mark.parametrize("name", FROM_JSON)
def test_encodes_as_the_tokenizers_library(
    tokenizer_of: Callable[[str], Tokenizer], folder_of: Callable[[str], Path], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    oracle = tokenizers.Tokenizer.from_file(str(folder_of(name) / "tokenizer.json"))
    for text in PROBES:
        assert tokenizer.encode(text) == oracle.encode(text).ids
        assert tokenizer.encode(text, add_bos=False) == oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_batch(PROBES) == [tokenizer.encode(text) for text in PROBES]


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_encodes_and_decodes_as_transformers(
    tokenizer_of: Callable[[str], Tokenizer], folder_of: Callable[[str], Path], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder_of(name))
    for text in PROBES:
        ids = oracle(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "word_piece"])
def test_decodes_any_ids_as_the_tokenizers_library(
    tokenizer_of: Callable[[str], Tokenizer], folder_of: Callable[[str], Path], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    oracle = tokenizers.Tokenizer.from_file(str(folder_of(name) / "tokenizer.json"))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=20), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("name", ["byte_fallback", *FROM_MODEL])
def test_decodes_well_formed_ids_as_the_library(
    tokenizer_of: Callable[[str], Tokenizer], folder_of: Callable[[str], Path], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    decode: Callable[[list[int]], str]
    if name == "byte_fallback":
        decode = tokenizers.Tokenizer.from_file(str(folder_of(name) / "tokenizer.json")).decode
    else:
        decode = sentencepiece.SentencePieceProcessor(model_file=str(folder_of(name) / "tokenizer.model")).decode
    plain = [id_ for id_ in range(tokenizer.vocab_size) if not _is_byte_or_special(tokenizer, id_)]

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from(plain), max_size=20))
    def check_pieces(ids: list[int]) -> None:
        assert tokenizer.decode(ids) == decode(ids)

    @settings(max_examples=200, deadline=None)
    @given(texts)
    def check_texts(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert tokenizer.decode(ids) == decode(ids)

    check_pieces()
    check_texts()


def _is_byte_or_special(tokenizer: Tokenizer, id_: int) -> bool:
    token = tokenizer.table.pieces[id_] if tokenizer.table is not None else None
    return token is None or len(token) == 1 or id_ in tokenizer.special_token_ids


def test_ill_formed_bytes_become_one_replacement_per_ill_formed_part(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "好".encode() + b"\xe5\xa5" + b"a"]
    assert tokenizer.decode(ids) == "好\ufffda"


@pytest.mark.parametrize("name", FROM_MODEL)
def test_encodes_as_sentencepiece(
    tokenizer_of: Callable[[str], Tokenizer], folder_of: Callable[[str], Path], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder_of(name) / "tokenizer.model"))

    @settings(max_examples=200, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == oracle.encode(text)
        assert tokenizer.encode(text, parse_special=False) == [oracle.bos_id(), *oracle.encode(text)]

    check()
    for text in PROBES:
        assert tokenizer.encode(text, add_bos=False) == oracle.encode(text)


def test_sentencepiece_encodes_each_part_between_special_tokens(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("sentencepiece_bpe")

    def part(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=False)

    text = "<|im_start|>user\nthe fox<|im_end|><s> the house"
    assert part(text) == [400, *part("user\nthe fox"), 401, 1, *part(" the house")]
    assert tokenizer.encode("<s>" + text) == part("<s>" + text)
    assert tokenizer.decode(tokenizer.encode(text)) == "user\nthe fox  the house"


def test_sentencepiece_without_legacy_has_no_dummy_prefix_after_special_tokens(tmp_path: Path) -> None:
    folder = sentencepiece_bpe(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    legacy = Tokenizer.from_folder(folder)
    write_json(folder / "tokenizer_config.json", **config, legacy=False)
    tokenizer = Tokenizer.from_folder(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    the_with = model.piece_to_id("▁the")
    assert model.encode("the") == [the_with]
    assert legacy.encode("the<|im_end|>the") == [1, the_with, 401, the_with]
    assert tokenizer.encode("the<|im_end|>the")[:3] == [1, the_with, 401]
    assert tokenizer.token_bytes(tokenizer.encode("the<|im_end|>the")[3])[:1] == b"t"
    assert tokenizer.decode(tokenizer.encode("the<|im_end|>the"), skip_special_tokens=False) == "<s> the<|im_end|>the"


def test_a_single_word_token_is_left_alone_inside_of_a_word(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe", remove_extra_whitespaces=False))
    token = {"content": "fox", "special": False, "single_word": True}
    write_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={"400": token})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert 400 in tokenizer.encode("the fox, and")
    assert 400 not in tokenizer.encode("the foxes and afox")


def test_white_space_around_a_stripping_token_is_taken_by_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe", remove_extra_whitespaces=False))
    token = {"content": "<|end|>", "special": True, "lstrip": True, "rstrip": True, "single_word": False}
    write_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={"400": token})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("fox  <|end|> \n fox") == [*tokenizer.encode("fox"), 400, *tokenizer.encode("fox")[1:]]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "sentencepiece_bpe"])
def test_special_tokens_in_user_text_can_be_taken_literally(
    tokenizer_of: Callable[[str], Tokenizer], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    for special in tokenizer.special_token_ids:
        text = f"say {tokenizer.token_text(special)} now"
        assert special in tokenizer.encode(text, add_bos=False)
        literal = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert not tokenizer.special_token_ids & set(literal)
        assert tokenizer.decode(literal) == text
    # The switch of one call leaves no trace in the next one.
    assert tokenizer.encode(text, add_bos=False) != literal


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "sentencepiece_bpe"])
def test_bos_is_never_doubled(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = tokenizer_of(name)
    bos = tokenizer.bos_token_id
    assert bos is not None
    for text in ("hello", tokenizer.token_text(bos) + "hello", ""):
        assert tokenizer.encode(text).count(bos) == 1
        assert tokenizer.encode(text)[0] == bos
    assert bos not in tokenizer.encode("hello", add_bos=False)


@pytest.mark.parametrize(("add_bos_token", "post_processor", "expected"), [
    (None, True, True), (None, False, False), (True, False, True), (True, True, True), (False, True, False),
])  # fmt: skip
def test_bos_as_the_checkpoint_has_it(
    folder_of: Callable[[str], Path], tmp_path: Path, add_bos_token: bool | None, post_processor: bool, expected: bool
) -> None:
    description = json.loads((folder_of("byte_level") / "tokenizer.json").read_text())
    if not post_processor:
        description["post_processor"] = None
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    write_json(tmp_path / "tokenizer.json", **description)
    write_json(tmp_path / "tokenizer_config.json", bos_token="<|bos|>", **config)
    assert (Tokenizer.from_folder(tmp_path).encode("hi")[0] == 0) is expected


def test_an_appended_eos_is_left_out(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    oracle = tokenizers.Tokenizer.from_file(str(folder_of("byte_level") / "tokenizer.json"))
    oracle.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A <|im_end|>", special_tokens=[("<|bos|>", 0), ("<|im_end|>", 2)]
    )
    oracle.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("hi") == oracle.encode("hi").ids[:-1]


def test_a_saved_limit_neither_cuts_nor_pads(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    oracle = tokenizers.Tokenizer.from_file(str(folder_of("byte_level") / "tokenizer.json"))
    expected = oracle.encode(SENTENCES[0]).ids
    oracle.enable_truncation(4)
    oracle.enable_padding(length=500)
    oracle.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(SENTENCES[0]) == expected


@pytest.mark.parametrize(("files", "eos"), [
    ({"generation_config": {"eos_token_id": [7, 8]}, "config": {"eos_token_id": 9}}, (7, 8)),
    ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (7, 2)),
    ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "config": {"eos_token_id": [9, 10]}}, (2, 9, 10)),
    ({"generation_config": {"do_sample": True}, "config": {"eos_token_id": [9, 10]}}, (9, 10)),
    ({"config": {"eos_token_id": [9, 10]}}, (9, 10)),
    ({"config": {"eos_token_id": [9, -1]}, "generation_config": {"bos_token_id": -1, "eos_token_id": -1}}, (9,)),
    ({"config": {"text_config": {"eos_token_id": 9}}}, (9,)),
    ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, (2,)),
    ({"tokenizer_config": {"eos_token": "not in the vocabulary"}}, ()),
    ({}, ()),
])  # fmt: skip
def test_eos_ids_by_the_order_of_files(
    folder_of: Callable[[str], Path], tmp_path: Path, files: dict[str, dict[str, object]], eos: tuple[int, ...]
) -> None:
    shutil.copy(folder_of("byte_level") / "tokenizer.json", tmp_path)
    for name, fields in files.items():
        write_json(tmp_path / f"{name}.json", **fields)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == eos


@pytest.mark.parametrize(("template", "settings", "end"), [
    ("$A <|im_end|>", {}, [2]),
    ("$A <|im_end|>", {"add_bos_token": False}, [2]),
    ("$A <|im_end|>", {"add_eos_token": False}, []),
    ("$A <|im_end|> <|im_end|>", {}, [2, 2]),
    ("$A", {"add_eos_token": True}, [2]),
    ("$A <|im_end|>", {"add_eos_token": True}, [2]),
    ("$A", {}, []),
])  # fmt: skip
def test_the_end_of_a_text_that_nothing_follows(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    template: str,
    settings: dict[str, bool],
    end: list[int],
) -> None:
    """What the tokenizer appends is for embeddings; in front of an answer it would end it."""
    oracle = tokenizers.Tokenizer.from_file(str(folder_of("byte_level") / "tokenizer.json"))
    oracle.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=[("<|im_end|>", 2)])
    oracle.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", eos_token="<|im_end|>", **settings)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("some text")
    assert ids == oracle.encode("some text", add_special_tokens=False).ids
    assert tokenizer.with_suffix(ids) == [*ids, *end]
    assert tokenizer.with_suffix([*ids, *end]) == [*ids, *end]


@pytest.mark.parametrize(("adds", "end"), [(True, [2]), (False, []), (None, [])])
def test_the_end_of_a_text_by_sentencepiece(
    folder_of: Callable[[str], Path], tmp_path: Path, adds: bool | None, end: list[int]
) -> None:
    shutil.copy(folder_of("sentencepiece_bpe") / "tokenizer.model", tmp_path)
    write_json(tmp_path / "tokenizer_config.json", add_eos_token=adds)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.with_suffix([5, 6]) == [5, 6, *end]


def test_tokens_and_special_ids(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("byte_level")
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.vocab_size == 402
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("nothing") is None
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(10**6) == ""
    assert (
        tokenizer.decode(tokenizer.encode("a <tool call> b<\uff5cwide\uff5c>")) == "a <tool call> b<\uff5cwide\uff5c>"
    )
    chat = tokenizer_of("sentencepiece_bpe")
    assert chat.special_token_ids == {0, 1, 2, 400, 401}
    assert chat.vocab_size == 402


@pytest.mark.parametrize("name", BUILDERS)
def test_a_byte_table_is_used_wherever_it_can_be(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    assert (tokenizer_of(name).table is None) is (name == "word_piece")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_bpe"])
def test_encoding_leaves_the_interpreter_free(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = tokenizer_of(name)
    text = "".join(SENTENCES) * 60

    def longest_gap() -> float:
        """The longest time this thread had to wait, as a fraction of the whole."""
        done = threading.Event()

        def encode() -> None:
            tokenizer.encode(text)
            done.set()

        worker = threading.Thread(target=encode)
        gaps = []
        started = last = time.perf_counter()
        worker.start()
        while not done.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        worker.join()
        return max(gaps) / (last - started)

    # `tokenizers.Tokenizer.encode` holds the interpreter nearly all the time. Several tries for a busy machine.
    assert min(longest_gap() for _ in range(4)) < 0.5


def test_several_threads_may_encode_at_once(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("byte_level")
    expected = [tokenizer.encode(text) for text in PROBES]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            for text, ids in zip(PROBES, expected, strict=True):
                tokenizer.encode("<|bos|>", parse_special=False)
                if tokenizer.encode(text) != ids:
                    wrong.append(text)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_bpe"])
def test_bad_input_is_refused(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = tokenizer_of(name)
    with pytest.raises(InvalidMessage, match=r"lone surrogate \(U\+D800\) at position 1"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(InvalidMessage, match="NoneType"):
        tokenizer.encode(None)  # type: ignore[arg-type]
    for ids in ([-1], [1.5], ["a"], None, torch.tensor([1])):
        with pytest.raises(InvalidParameter, match="token id"):
            tokenizer.decode(ids)  # type: ignore[arg-type]


def test_a_missing_folder_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidCheckpoint, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("file", "content", "reason"), [
    ("tokenizer.json", b'{"version": "1.0", "mod', "tokenizer.json"),
    ("tokenizer.json", b"", "tokenizer.json"),
    (
        "tokenizer.json",
        b'{"added_tokens": [], "model": {"type": "BPE", "unk_token": "?", "vocab": {"0": 0}, "merges": []}}',
        "tokenizer.json is not a tokenizer that `tokenizers` can read: Unk token",
    ),
    ("tokenizer_config.json", b"[1, 2]", "tokenizer_config.json is not a JSON object"),
    ("tokenizer_config.json", b'{"eos_token": 5}', "eos_token"),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}', "added_tokens_decoder"),
    ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
    ("tokenizer_config.json", b"\xff\xfe", "not a JSON object"),
    ("generation_config.json", b'{"eos_token_id": "two"}', "eos_token_id in generation_config.json is 'two'"),
    ("generation_config.json", b'{"eos_token_id": [1, -2]}', "eos_token_id"),
    ("generation_config.json", b'{"bos_token_id": true}', "bos_token_id"),
    ("added_tokens.json", b'{"<x>": "1"}', "added_tokens.json"),
    ("config.json", b"{", "config.json"),
])  # fmt: skip
def test_damaged_files_are_named(
    folder_of: Callable[[str], Path], tmp_path: Path, file: str, content: bytes, reason: str
) -> None:
    shutil.copy(folder_of("byte_level") / "tokenizer.json", tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=reason.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_sentencepiece_model_is_named(tmp_path: Path) -> None:
    other = sentencepiece_model("bpe").replace(b"<unk>", b"<un\xae>")
    for content in (b"", b"version https://git-lfs.github.com/spec/v1", b"\x00" * 100, other):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.model"):
            Tokenizer.from_folder(tmp_path)


def test_a_character_that_no_token_has_is_named(tmp_path: Path) -> None:
    """Where no token stands for the unknown either."""
    tokenizers.Tokenizer(tokenizers.models.Unigram([(letter, -1.0) for letter in "abx "])).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab") == [0, 1]
    for options in ({}, {"parse_special": False}, {"literal_spans": [(0, 1)]}):
        with pytest.raises(InvalidMessage, match="unknown token"):
            tokenizer.encode("a?", **options)


def test_tokenizer_files_of_two_models_are_refused(tmp_path: Path) -> None:
    folder = sentencepiece_bpe(tmp_path)
    write_json(folder / "tokenizer_config.json", added_tokens_decoder={"5": {"content": "<other>", "special": True}})
    with pytest.raises(InvalidCheckpoint, match="different models"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_json_that_is_nested_too_deeply_is_a_damaged_file(tmp_path: Path, name: str) -> None:
    folder = BUILDERS["byte_level"](tmp_path)
    (folder / name).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", encoding="utf-8")
    with pytest.raises(InvalidCheckpoint, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_lone_surrogate_is_in_no_vocabulary(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    assert tokenizer_of(name).token_id("a\ud800") is None


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_bpe"])
@pytest.mark.parametrize("fields", [
    {"extra_special_tokens": 5},
    {"additional_special_tokens": "<a>"},
    {"added_tokens_decoder": {"99999999999": {"content": "x"}}},
    {"added_tokens_decoder": {"-1": {"content": "x"}}},
])  # fmt: skip
def test_settings_of_the_wrong_kind_are_named(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str, fields: dict[str, object]
) -> None:
    shutil.copytree(folder_of(name), tmp_path, dirs_exist_ok=True)
    write_json(tmp_path / "tokenizer_config.json", **fields)
    with pytest.raises(InvalidCheckpoint, match=next(iter(fields))):
        Tokenizer.from_folder(tmp_path)


def test_an_enormous_id_is_a_damaged_file(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    description = json.loads((folder_of("byte_level") / "tokenizer.json").read_text())
    description["model"]["vocab"]["a"] = 2**32 - 1
    write_json(tmp_path / "tokenizer.json", **description)
    with pytest.raises(InvalidCheckpoint, match="token id 4294967295"):
        Tokenizer.from_folder(tmp_path)


def test_pieces_in_reserve_may_have_another_name(tmp_path: Path) -> None:
    """As in InternLM2-chat, whose `<|im_end|>` is `[UNUSED_TOKEN_145]` in tokenizer.model."""
    reserved = [f"[UNUSED_TOKEN_{number}]" for number in (144, 145, 146)]
    model = sentencepiece_model("bpe", user_defined_symbols=reserved, remove_extra_whitespaces=False)
    (tmp_path / "tokenizer.model").write_bytes(model)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    start, end = oracle.piece_to_id(reserved[2]), oracle.piece_to_id(reserved[1])
    added = {str(start): {"content": "<|im_start|>", "special": True}, str(end): {"content": "<|im_end|>"}}
    write_json(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="InternLM2Tokenizer",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        added_tokens_decoder=added,
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert {start, end} <= tokenizer.special_token_ids
    assert tokenizer.token_id("<|im_end|>") == end
    assert tokenizer.token_id(reserved[1]) is None
    assert tokenizer.token_id(reserved[0]) == oracle.piece_to_id(reserved[0])
    ids = tokenizer.encode("<|im_start|>user\nthe fox<|im_end|>\n", add_bos=False)
    assert ids == [start, *oracle.encode("user\nthe fox"), end, *oracle.encode("\n")]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|> user\nthe fox<|im_end|> \n"
    # The old name is text, so no user can end a turn by it.
    assert end not in tokenizer.encode(f"the {reserved[1]} fox")
    assert tokenizer.decode(tokenizer.encode(f"the {reserved[1]} fox")) == f"the {reserved[1]} fox"


def test_the_unknown_piece_cannot_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    write_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={"0": {"content": "<other>"}})
    with pytest.raises(InvalidCheckpoint, match="different models"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("named", [{}, {"403": "sop", "406": "<|user|>"}], ids=["first files", "newer files"])
def test_tokens_of_chatglm_that_only_its_code_has(
    folder_of: Callable[[str], Path], tmp_path: Path, named: dict[str, str]
) -> None:
    shutil.copy(folder_of("sentencepiece_bpe") / "tokenizer.model", tmp_path)
    added = {id_: {"content": text, "special": True} for id_, text in named.items()}
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="ChatGLMTokenizer", added_tokens_decoder=added)
    write_json(tmp_path / "config.json", eos_token_id=2)
    tokenizer = Tokenizer.from_folder(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert tokenizer.encode("a") == [401, 403, *processor.encode("a")]
    assert tokenizer.encode("[gMASK]sop<|user|>\n a") == [401, 403, 406, *processor.encode("\n a")]
    assert tokenizer.encode("philosophy", add_bos=False) == processor.encode("philosophy")
    # The next turn of a user and of a tool end an answer too.
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ((2, 406, 408), 409)
    assert tokenizer.decode([401, 403, 406, *processor.encode("a sop")]) == "a sop"
