"""`asyncllm serve` with an engine that dies at every prompt that holds "death". The arguments are those of `serve`."""

from __future__ import annotations

import sys
from typing import Any

from asyncllm import cli
from asyncllm.engine import async_engine
from asyncllm.testing import FakeEngine, Fault, FaultPlan


def _engine(*_: Any) -> FakeEngine:
    return FakeEngine("pong", faults=FaultPlan(Fault("admit", request="death")))


async_engine.AsyncEngine = _engine  # type: ignore[assignment, misc]
sys.exit(cli.main(["serve", *sys.argv[1:]]))
