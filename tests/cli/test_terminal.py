"""A conversation at the prompt: editing, history and commands, with answers that repeat the message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.terminal import Terminal

ECHO = """
from asyncllm.errors import ContextLengthExceeded, ServerError
from asyncllm.cli.terminal import converse
from asyncllm.types import Chunk

class Echo:
    def answer(self, text):
        if text == "long here":
            raise ContextLengthExceeded(9, 8, "the session length")
        if text == "long there":
            raise ServerError("too long", status=400, code="context_length_exceeded")
        yield Chunk(text=repr(text), finish_reason="stop")

    def forget(self):
        pass

converse("echo", Echo())
"""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(program=("-c", ECHO))
    terminal.expect("echo: .*\r\n> ")
    yield terminal
    terminal.close()


def test_lines_are_edited_remembered_and_pasted(terminal: Terminal) -> None:
    terminal.type("wold\x1b[D\x1b[Dr\n")
    terminal.expect(r"'world'\r\n> ")
    terminal.type("\x1b[A!\n")
    terminal.expect(r"'world!'\r\n> ")
    terminal.type("\x1b[200~one\n\ttwo\x1b[201~\n")
    terminal.expect(r"'one\\n\\ttwo'\r\n> ")
    terminal.type("a\tb\n")
    terminal.expect(r"'a\\tb'\r\n> ")


def test_a_mistyped_command_is_no_message(terminal: Terminal) -> None:
    terminal.type("/help\n")
    terminal.expect(r"\nType a message\..*\r\n> ")
    terminal.type("/rest\n")
    terminal.expect(r"There is no command /rest\..*/reset or end forgets.*\r\n> ")
    terminal.type("/image\n")
    terminal.expect(r"/image needs a file.*\r\n> ")
    terminal.type("/etc/hosts\n")
    terminal.expect(r"'/etc/hosts'\r\n> ")


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_conversation_that_is_too_long_says_how_to_go_on(terminal: Terminal, where: str) -> None:
    terminal.type(f"long {where}\n")
    terminal.expect(r"asyncllm: .*\r\nThe earlier turns count too: /reset forgets them\.\r\n> ")
