"""The command line: `asyncllm`, or `python -m asyncllm`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130
"""Exit status of shells after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if it failed, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        # Ctrl-C may also come during this import, which takes most of the time of a short command.
        from asyncllm.cli.commands import run_command

        return run_command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
