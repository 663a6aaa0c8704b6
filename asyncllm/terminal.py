"""Answers and conversations in a terminal, whoever gives the answers."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from typing import Any, Protocol

from asyncllm.errors import AsyncLLMError

__all__ = ["CHAT_HELP", "Conversation", "Piece", "converse", "print_answer"]

CHAT_HELP = "Type a message. Ctrl-C stops an answer, /reset forgets the conversation, exit or Ctrl-D leaves."


class Piece(Protocol):
    """A part of an answer."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ends here; None: it goes on."""


class Conversation(Protocol):
    """What answers in turns, and remembers them."""

    def answer(self, text: str) -> Generator[Piece, Any, Any]:
        """The answer to a message. Closing the generator stops it. Raises AsyncLLMError."""

    def forget(self) -> None:
        """Begin anew. Raises AsyncLLMError."""


def converse(name: str, conversation: Conversation) -> None:
    """Ask and answer until the user leaves."""
    print(f"{name}: {CHAT_HELP}")
    while (text := _ask()) is not None:
        try:
            if text == "/reset":
                conversation.forget()
                print("(forgotten)")
            elif text:
                _turn(conversation.answer(text))
        except AsyncLLMError as error:
            print(f"asyncllm: {error}", file=sys.stderr)


def print_answer(pieces: Iterable[Piece]) -> str | None:
    """Print an answer as it comes; returns its finish reason."""
    ending = None
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        ending = piece.finish_reason
    return ending


def _ask() -> str | None:
    """The next line; None when the user leaves. Ctrl-C at the prompt clears the line."""
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
        print("" if ending == "stop" else f" ({ending})")
    except KeyboardInterrupt:
        answer.close()
        print(" (stopped)")
