"""Imports go downwards only. The levels are those of DESIGN.md; a new part of the package gets its line here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "asyncllm"

LEVELS = [
    {"errors", "config", "types", "batch", "flags"},
    {"kernels", "distributed", "text", "locate"},
    {"layers"},
    {"quant"},
    {"models", "vl"},
    {"agent"},
    {"engine"},
    {"loop_thread", "pipeline", "server", "cli", "__main__", "doctor", "testing"}
    | {"messages", "model", "pytorch", "turbomind", "serve", "model_options", "terminal"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

ENGINE_OPENS_LAZILY = {"asyncllm.agent.executor", "asyncllm.agent.scoring"}
"""What the engine imports of the levels with torch, inside a function only."""

ALLOWED_LEVELS = {"kernels": {"kernels"}, "engine": LEVELS[0] | {"text", "locate", "engine"}}
"""Parts that see less than everything below them."""


class Import:
    """One imported module: its dotted name, where, and whether only inside a function or for type checkers."""

    def __init__(self, name: str, line: int, deferred: bool) -> None:
        self.name, self.line, self.deferred = name, line, deferred

    @property
    def part(self) -> str:
        """The first name below asyncllm; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]


def imports_of(source: str) -> Iterator[Import]:
    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = True
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, deferred)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                assert child.module is not None
                for alias in child.names:
                    inside = child.module == "asyncllm" and alias.name in LEVEL
                    yield Import(f"asyncllm.{alias.name}" if inside else child.module, child.lineno, deferred)
            yield from walk(child, inner)

    yield from walk(ast.parse(source), False)


def complaints(part: str, source: str) -> list[str]:
    """What the file's imports do wrong, given the part of the package that it belongs to."""
    found = []
    for imported in imports_of(source):
        root = imported.name.split(".")[0]
        if root in {"torch", "triton"} and LEVEL[part] in (0, 6):
            found.append(f"line {imported.line}: {part} imports {root}")
        if root in {"aiohttp", "requests", "httpx", "http", "socket"} and part in {"engine", "agent", "kernels"}:
            found.append(f"line {imported.line}: {part} imports {root}")
        if root != "asyncllm":
            continue
        if part == "engine" and imported.deferred and imported.name in ENGINE_OPENS_LAZILY:
            continue
        target = imported.part
        if not target:
            allowed = LEVEL[part] == len(LEVELS) - 1  # only faces see the package's own public names
        elif part in ALLOWED_LEVELS:
            allowed = target in ALLOWED_LEVELS[part]
        else:
            allowed = target == part or LEVEL[target] < LEVEL[part] or LEVEL[part] in (0, len(LEVELS) - 1)
        if LEVEL[part] == 0 and target and LEVEL[target] != 0:
            allowed = False
        if not allowed:
            found.append(f"line {imported.line}: {part} imports {imported.name}")
    return found


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    assert part_of(path) in LEVEL, f"{path} belongs to no level"
    assert complaints(part_of(path), path.read_text()) == []


def test_no_import_cycle() -> None:
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files()}
    modules = {name.removesuffix(".__init__") for name in names.values()}
    graph = {
        name.removesuffix(".__init__"): {
            imported.name for imported in imports_of(path.read_text()) if not imported.deferred
        }
        & modules - {name.removesuffix(".__init__")}
        for path, name in names.items()
    }
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("engine", "import torch"),
        ("engine", "def f():\n    import torch"),
        ("engine", "from asyncllm.agent.executor import open_executor"),
        ("engine", "from asyncllm import agent"),
        ("engine", "from asyncllm.layers.step_inputs import StepInputs"),
        ("engine", "import aiohttp"),
        ("kernels", "from asyncllm.errors import ModelError"),
        ("layers", "from asyncllm.models.config import ModelConfig"),
        ("config", "from asyncllm.text.tokenizer import Tokenizer"),
        ("batch", "import torch"),
        ("text", "from asyncllm.kernels import rms_norm"),
        ("models", "from asyncllm.agent import executor"),
        ("agent", "from asyncllm import AsyncEngine"),
    ],
)
def test_wrong_imports_are_noticed(part: str, source: str) -> None:
    assert len(complaints(part, source)) == 1


def test_the_engine_may_open_its_executor_inside_a_function() -> None:
    assert complaints("engine", "def f():\n    from asyncllm.agent.executor import open_executor") == []


def test_engine_and_text_import_without_torch() -> None:
    program = (
        "import sys, pkgutil, importlib\n"
        "sys.modules['torch'] = None\n"
        "import asyncllm.engine, asyncllm.text\n"
        "for package in (asyncllm.engine, asyncllm.text):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent, timeout=50)
