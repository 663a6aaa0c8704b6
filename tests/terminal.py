"""`asyncllm` in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.processes import USUAL_SIGNALS

__all__ = ["Terminal"]

ROOT = Path(__file__).parent.parent

# Makes standard input the controlling terminal, so that its Ctrl-C arrives as a signal, and becomes the command.
IN_TERMINAL = "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + USUAL_SIGNALS

PASTING = r"\x1b\[\?2004[hl]\r?"
"""Tells a terminal to mark what is pasted."""


class Terminal:
    """One command, which is typed to and read from: `asyncllm`, or another `program` of Python's."""

    def __init__(self, *arguments: str, program: Sequence[str] = ("-m", "asyncllm")) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *program, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def shows(self, pattern: str, within: float) -> bool:
        """Whether `pattern` shows up within so many seconds."""
        deadline = time.monotonic() + within
        while re.search(pattern, self.text) is None:
            if not select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0]:
                return False
            try:
                text = self.text + os.read(self.master, 65536).decode("utf-8", "replace")
                self.text = re.sub(PASTING, "", text)
            except OSError:  # the program has ended
                return re.search(pattern, self.text) is not None
        return True

    def expect(self, pattern: str) -> None:
        """Read until `pattern` shows, and forget everything up to its end."""
        assert self.shows(pattern, within=30), f"no {pattern!r} in {self.text!r}"
        found = re.search(pattern, self.text)
        assert found is not None
        self.text = self.text[found.end() :]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
