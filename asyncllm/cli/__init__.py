"""The command line: `asyncllm`, or `python -m asyncllm`."""

from __future__ import annotations

from asyncllm.cli.commands import main

__all__ = ["main"]
