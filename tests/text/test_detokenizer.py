"""The deltas concatenate to the full decode, and stop words never leak."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import InvalidParameter
from asyncllm.text.detokenizer import Detokenizer, StopMatcher, StopWords
from asyncllm.text.tokenizer import Tokenizer
from tests.text.checkpoints import BUILDERS, SENTENCES

ids_in_chunks = st.lists(st.lists(st.integers(0, 520), max_size=6), max_size=12)


def stream(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], *, skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", BUILDERS)
def test_deltas_concatenate_to_the_full_decode(tokenizer_of: Callable[[str], Tokenizer], name: str, skip: bool) -> None:
    tokenizer = tokenizer_of(name)

    @settings(max_examples=150, deadline=None)
    @given(ids_in_chunks)
    def check(chunks: list[list[int]]) -> None:
        ids = [id_ for chunk in chunks for id_ in chunk]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, chunks, skip=skip)) == whole
        assert "".join(stream(tokenizer, [[id_] for id_ in ids], skip=skip)) == whole

    check()


@pytest.mark.parametrize("name", BUILDERS)
def test_incomplete_characters_are_held_back(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = tokenizer_of(name)
    for sentence in SENTENCES[:4]:
        ids = tokenizer.encode(sentence)
        deltas = stream(tokenizer, [[id_] for id_ in ids], skip=True)
        assert "".join(deltas) == tokenizer.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "sentencepiece_bpe"])
def test_a_cut_character_becomes_one_replacement_at_the_end(
    tokenizer_of: Callable[[str], Tokenizer], name: str
) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode("a 🦜")
    assert tokenizer.decode(ids) == "a 🦜"
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([id_]) for id_ in ids[:-1]) == "a "
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "word_piece"])
def test_time_is_linear_in_undecodable_tokens(tokenizer_of: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = tokenizer_of(name)
    broken = next(
        (id_ for id_ in range(tokenizer.vocab_size) if tokenizer.token_bytes(id_) == b"\xe4"), tokenizer.vocab_size - 1
    )

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(tokenizer)
        started = time.thread_time()
        for _ in range(count):
            detokenizer.push([broken])
        return time.thread_time() - started

    short, long = min(seconds(1000) for _ in range(3)), min(seconds(8000) for _ in range(3))
    assert long < 30 * short


def test_a_plain_token_costs_half_a_microsecond(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("byte_level")
    chunks = [[id_] for id_ in tokenizer.encode("the lazy dog stands beside the little house " * 40)]

    def seconds_per_token() -> float:
        push = Detokenizer(tokenizer).push
        started = time.thread_time()
        for chunk in chunks:
            push(chunk)
        return (time.thread_time() - started) / len(chunks)

    # A margin of 4 for a busy machine.
    assert min(seconds_per_token() for _ in range(20)) < 2e-6


def first_to_complete(text: str, words: list[str]) -> tuple[int, int, str] | None:
    found = [(text.find(word) + len(word), text.find(word), word) for word in words if word in text]
    return min(found, default=None)


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=600, deadline=None)
@given(
    text=st.text("ab\n", max_size=24),
    words=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=24),
    include=st.booleans(),
)
def test_stop_words_do_not_depend_on_the_split(text: str, words: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(StopWords(words), include=include)
    emitted, matched = "", None
    for chunk in split(text, cuts):
        safe, matched = matcher.push(chunk)
        emitted += safe
        if matched is not None:
            break
    match = first_to_complete(text, words)
    if match is None:
        assert matched is None
        assert emitted + matcher.flush() == text
    else:
        end, start, word = match
        assert matched == word
        assert emitted == text[: end if include else start]
        assert matcher.flush() == ""
        assert matcher.push("more") == ("", word)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=12), words=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_word_is_held_back(text: str, words: list[str]) -> None:
    matcher = StopMatcher(StopWords(words))
    safe, matched = matcher.push(text)
    if matched is None:
        held = max((size for word in words for size in range(1, len(word)) if text.endswith(word[:size])), default=0)
        assert safe == text[: len(text) - held]


def test_no_words_pass_everything() -> None:
    matcher = StopMatcher(StopWords([]))
    assert matcher.push("text") == ("text", None)
    assert matcher.flush() == ""


def test_an_empty_stop_word_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="empty"):
        StopWords(["</s>", ""])


def size_of(make: Callable[[], object]) -> int:
    """Bytes that what `make` returns takes."""
    tracemalloc.start()
    try:
        kept = make()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del kept
    return size


@pytest.mark.parametrize("words", [["ab" * 4_000 + "c"], [f"{index:02}" + "ab" * 127 for index in range(16)]])
def test_stop_words_take_space_by_their_length(words: list[str]) -> None:
    def answers() -> object:
        stops = StopWords(words)
        matchers = [StopMatcher(stops) for _ in range(128)]
        for matcher in matchers:
            for word in words:
                matcher.push(word[:-1])
        return stops, matchers

    assert size_of(answers) < 20 * sum(map(len, words)) + 128 * 1000


def test_a_long_stop_word_is_matched_in_linear_time() -> None:
    class Text(str):
        """Counts how often a character of it is read."""

        reads = 0

        def __getitem__(self, key: Any) -> str:
            Text.reads += 1
            return super().__getitem__(key)

    size = 4000
    stops = StopWords(["a" * size + "b", "ab" * (size // 2) + "c"])
    for word in stops.words:
        word.text = Text(word.text)
    matcher = StopMatcher(stops)
    text = ("a" * (size - 1) + "c" + "ab" * (size // 2) + "d") * 3
    assert "".join(matcher.push(text[start : start + 7])[0] for start in range(0, len(text), 7)) == text
    assert Text.reads < 12 * len(text)
    assert matcher.push("a" * (2 * size)) == ("a" * size, None)
    assert matcher.push("b")[1] == "a" * size + "b"


class Neighbours:
    """A tokenizer without a byte table, whose tokens read by what comes before them; 0 is half a character."""

    table = None

    def visible(self, ids: Sequence[int], *, skip_special_tokens: bool) -> Sequence[int]:
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        pairs = zip([0, *ids], ids, strict=False)
        return "".join(chr(97 + (before + token) % 26) if token else "\ufffd" for before, token in pairs)


def test_a_token_is_read_behind_its_neighbours() -> None:
    tokenizer: Any = Neighbours()
    ids = [7 * index % 25 + 1 for index in range(40)]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_what_stays_undecodable_is_not_held_back_for_ever() -> None:
    tokenizer: Any = Neighbours()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([0]) for _ in range(20)]
    assert [len(piece) for piece in pieces] == [0] * 7 + [8] + [0] * 7 + [8] + [0] * 4
    assert detokenizer.flush() == "\ufffd" * 4
