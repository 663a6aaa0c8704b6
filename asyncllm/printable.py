"""Make foreign text safe to display: in a terminal, which obeys control characters, and in one line of a log."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

__all__ = ["in_one_line", "in_terminal", "to_stderr"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def in_terminal(text: str) -> str:
    """Return the text with all control characters escaped except tabs and line ends. Others move the cursor, set the
    window title, and write to the clipboard."""
    return CONTROL.sub(lambda found: _spelled(found[0]), text)


def in_one_line(text: str) -> str:
    """Return the text as one line that reads as it is written: without bidirectional marks and invisible characters as
    well."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _spelled(character) for character in text)


def to_stderr(text: str) -> None:
    """Write the text to standard error. If that fails, because the disk is full or the terminal is gone, the program
    continues."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(in_terminal(text), file=sys.stderr, flush=True)


def _spelled(character: str) -> str:
    return ascii(character)[1:-1]
