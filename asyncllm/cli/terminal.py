"""Answers and conversations in a terminal, with a model in this process or a server."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable
from typing import Any, Protocol

from asyncllm.errors import AsyncLLMError, ContextLengthExceeded, ServerError
from asyncllm.printable import in_terminal, to_stderr

__all__ = ["CHAT_HELP", "Conversation", "Piece", "converse", "print_answer"]

CHAT_HELP = (
    "Type a message. Ctrl-C stops an answer, /image FILE adds an image, /reset or end forgets the conversation, exit "
    "or Ctrl-D leaves."
)

FORGETS = ("/reset", "end")
"""Lines that begin anew; the second is LMDeploy's."""

COMMAND = re.compile(r"/[a-z]+")
"""A line of this form is not a message: a mistyped command must not be sent to a model."""


class Piece(Protocol):
    """A part of an answer."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ends here; None while it continues."""


class Conversation(Protocol):
    """Answers in turns, and remembers them."""

    def answer(self, text: str) -> Generator[Piece, Any, Any]:
        """Yield the answer to a message. Closing the generator stops it. Raises AsyncLLMError."""

    def attach(self, image: str) -> None:
        """Attach an image, a file or a URL, to the next message. Raises AsyncLLMError."""

    def forget(self) -> None:
        """Begin anew. Raises AsyncLLMError."""


def converse(name: str, conversation: Conversation) -> None:
    """Converse until the user leaves."""
    print(f"{in_terminal(name)}: {CHAT_HELP}")
    _edit_lines()
    while (text := _ask()) is not None:
        try:
            if text in FORGETS:
                conversation.forget()
                print("(forgotten)")
            elif text == "/image":
                print("/image needs a file, as in /image cat.png")
            elif text.startswith("/image "):
                conversation.attach(text.removeprefix("/image ").strip())
                print("(goes with the next message)")
            elif COMMAND.fullmatch(text):
                print(CHAT_HELP if text == "/help" else f"There is no command {text}. {CHAT_HELP}")
            elif text:
                _turn(conversation.answer(text))
        except AsyncLLMError as error:
            to_stderr(f"asyncllm: {error}")
            here = isinstance(error, ContextLengthExceeded)
            if here or (isinstance(error, ServerError) and error.code == "context_length_exceeded"):
                to_stderr("The earlier turns count too: /reset forgets them.")


def print_answer(pieces: Iterable[Piece]) -> str | None:
    """Print an answer as it arrives, with control characters spelled out. Return its finish reason."""
    ending = None
    for piece in pieces:
        sys.stdout.write(in_terminal(piece.text))
        sys.stdout.flush()
        ending = piece.finish_reason
    return ending


def _edit_lines() -> None:
    """Let `input` edit its line, remember earlier lines until the program ends, and take a paste of several lines as
    one message. Has no effect if Python lacks readline or input is not a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: self-insert")  # Instead of file names.


def _ask() -> str | None:
    """Return the next line; None when the user leaves. Ctrl-C at the prompt clears the line."""
    try:
        text = input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return None if text == "exit" else text


def _turn(answer: Generator[Piece, Any, Any]) -> None:
    try:
        ending = print_answer(answer)
        print("" if ending in ("stop", "tool_calls") else in_terminal(f" ({ending})"))
    except KeyboardInterrupt:
        answer.close()
        print(" (stopped)")
