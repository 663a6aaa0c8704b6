"""Text of clients and models reaches terminals and logs as text only."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import cli
from asyncllm.cli.terminal import converse, print_answer
from asyncllm.errors import ServerError
from asyncllm.printable import in_one_line, in_terminal, to_stderr
from asyncllm.types import Chunk

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
MARKS = "\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u200b\ufeff\u2028"
ATTACKS = [CLIPBOARD, "\x9d52;c;eA==\x9c", "\x1b[2J", "\x1b]0;title\x1b\\", "\rhidden", "a\bb", "\x7f", "\x00", "\x85"]


@pytest.mark.parametrize("text", ATTACKS, ids=ascii)
def test_no_control_character_reaches_a_terminal(text: str) -> None:
    assert in_terminal(text).isprintable()
    assert in_one_line(text).isprintable()


def test_text_stays_as_it_is() -> None:
    for text in ("plain, ümlaut\n\tcode()", "שלום \u2067עולם\u2069", "👩‍💻", ""):
        assert in_terminal(text) == text
    assert in_one_line("plain text, ümlaut") == "plain text, ümlaut"
    assert in_one_line("a\nb\tc\\") == r"a\nb\tc" + "\\"


@pytest.mark.parametrize(
    "mark", "\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u200b\ufeff\u2028", ids=ascii
)
def test_no_mark_that_turns_or_hides_text_reaches_a_log(mark: str) -> None:
    assert in_one_line(f"user{mark}nimda") == f"user{ascii(mark)[1:-1]}nimda"
    assert in_one_line("\ud800\U000e0041") == r"\ud800\U000e0041"


class Hostile:
    """A model or a server that writes to its user's clipboard."""

    def answer(self, text: str) -> Generator[Any, None, None]:
        if text == "fail":
            raise ServerError(f"no such thing{CLIPBOARD}", status=400)
        # In pieces, as none of them alone is an attack.
        for character in CLIPBOARD:
            yield Chunk(text=character)
        yield Chunk(text="", finish_reason=f"stop{CLIPBOARD}")  # type: ignore[arg-type]

    def forget(self) -> None:
        pass


def test_an_answer_a_name_and_an_error_are_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "fail", "exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    converse(f"model{CLIPBOARD}", Hostile())
    print_answer(Hostile().answer(""))
    out, err = capsys.readouterr()
    for written in (out, err):
        assert r"\x1b]52;c;" in written
        assert "".join(written.split("\n")).isprintable()


def test_the_command_lines_errors_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(tmp_path / CLIPBOARD), "hi"]) == 1
    assert r"\x1b]52;c;" in capsys.readouterr().err


class Full(io.StringIO):
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_message_that_cannot_be_written_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to_stderr("too bad")
    assert capsys.readouterr() == ("", "too bad\n")
    monkeypatch.setattr(sys, "stderr", Full())
    to_stderr("too bad")
    monkeypatch.setattr(sys, "stderr", None)
    to_stderr("too bad")
    assert capsys.readouterr().out == ""
