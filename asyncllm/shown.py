"""Text of others as people see it: in a terminal, which obeys control characters, and in the lines of a log."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

__all__ = ["complain", "in_one_line", "in_terminal"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def in_terminal(text: str) -> str:
    """Return the text with control characters spelled out, all but tabs and line ends: they move the cursor, set the
    window's title, and write to the clipboard."""
    return CONTROL.sub(lambda found: _spelled(found[0]), text)


def in_one_line(text: str) -> str:
    """Return the text in one line that reads as it is written: also without marks that turn its direction round (bidi),
    and characters that do not show."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _spelled(character) for character in text)


def complain(text: str) -> None:
    """Say it on standard error. One that cannot be written to, as its disk is full or its terminal gone, ends no
    program."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(in_terminal(text), file=sys.stderr, flush=True)


def _spelled(character: str) -> str:
    return ascii(character)[1:-1]
