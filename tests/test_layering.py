"""Imports go downwards only. The levels are those of DESIGN.md; a new part of the package gets its line here.

The fakes and faults of `asyncllm.testing` may see the engine: they stand in front of its parts, and reach into none.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asyncllm
from asyncllm import AsyncEngine

PACKAGE = Path(__file__).parent.parent / "asyncllm"

LEVELS = [
    {"errors", "config", "types", "prompt_image", "protocol", "event_loop", "printable"},
    {"kernels", "text"},
    {"locate"},
    {"tokenizer"},
    {"distributed"},
    {"layers"},
    {"quant"},
    {"vl"},
    {"models"},
    {"agent", "lite", "porting"},
    {"ranks"},
    {"engine"},
    {"pipeline", "server"},
    {"http_client", "testing"},
    {"cli"},
    {"serve", "messages", "model", "pytorch", "turbomind"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

ENGINE_OPENS_LAZILY = {
    "asyncllm.agent.executor",
    "asyncllm.agent.prompt_outputs",
    "asyncllm.ranks.executor",
    "asyncllm.vl.processor",
}
"""What the engine imports of the levels with torch, inside a function only."""

FACES = set[str]().union(*LEVELS[12:])
"""Parts that see the package's public names and, apart from `testing`, no more of the engine."""

INSTANCE_FIELDS = {"chat_template_config", "config", "model_name", "model_path"}
OPEN_TO_FACES = {name for name in dir(AsyncEngine) if not name.startswith("_")} - {"running"} | INSTANCE_FIELDS
"""What they may ask of an engine: `running` gives its loop, for the engine's own tests."""

ALLOWED_LEVELS = {"kernels": {"kernels"}, "engine": LEVELS[0] | {"text", "locate", "tokenizer", "engine"}}
"""Parts that see less than everything below them."""


class Import:
    """One import: the module's dotted name, what is taken from it, where, and whether only inside a function or for
    type checkers."""

    def __init__(self, name: str, taken: str, line: int, deferred: bool) -> None:
        self.name, self.taken, self.line, self.deferred = name, taken, line, deferred

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
                    yield Import(alias.name, "", child.lineno, deferred)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                assert child.module is not None
                for alias in child.names:
                    inside = child.module == "asyncllm" and alias.name in LEVEL
                    name = f"asyncllm.{alias.name}" if inside else child.module
                    yield Import(name, alias.name, child.lineno, deferred)
            yield from walk(child, inner)

    yield from walk(ast.parse(source), False)


def complaints(part: str, source: str) -> list[str]:
    """What the file's imports do wrong, given the part of the package that it belongs to."""
    found = []
    for imported in imports_of(source):
        root = imported.name.split(".")[0]
        if root in {"torch", "triton"} and LEVEL[part] in (0, LEVEL["engine"]):
            found.append(f"line {imported.line}: {part} imports {root}")
        if root in {"aiohttp", "requests", "httpx", "http", "socket"} and part in {"engine", "agent", "kernels"}:
            found.append(f"line {imported.line}: {part} imports {root}")
        if root != "asyncllm":
            continue
        if part == "engine" and imported.deferred and imported.name in ENGINE_OPENS_LAZILY:
            continue
        target = imported.part
        if target == "engine" and part in FACES - {"testing"} and imported.taken not in asyncllm.__all__:
            found.append(f"line {imported.line}: {part} imports {imported.taken or 'all'} of {imported.name}")
        if not target:
            allowed = part in FACES
        elif part in ALLOWED_LEVELS:
            allowed = target in ALLOWED_LEVELS[part]
        else:
            allowed = target == part or LEVEL[target] < LEVEL[part] or LEVEL[part] == 0
        if LEVEL[part] == 0 and target and LEVEL[target] != 0:
            allowed = False
        if not allowed:
            found.append(f"line {imported.line}: {part} imports {imported.name}")
    return found


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_down() -> None:
    assert {part_of(path) for path in files()} - LEVEL.keys() == set(), "these belong to no level"
    found = {str(path): complaints(part_of(path), path.read_text()) for path in files()}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def sources() -> dict[str, str]:
    """Each file's source by its module's name."""
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files()}
    return {name.removesuffix(".__init__"): path.read_text() for path, name in names.items()}


def graph_of(sources: dict[str, str], *, deferred: bool) -> dict[str, set[str]]:
    """The modules that each one imports; with `deferred`, also inside functions and for type checkers."""
    graph = {}
    for name, source in sources.items():
        found = (each for each in imports_of(source) if deferred or not each.deferred)
        imported = {taken if (taken := f"{each.name}.{each.taken}") in sources else each.name for each in found}
        graph[name] = imported & sources.keys() - {name}
    return graph


def circles(sources: dict[str, str]) -> list[set[str]]:
    """The largest sets of modules that lead to each other, by imports of any kind."""
    graph = graph_of(sources, deferred=True)
    reached: dict[str, set[str]] = {}
    for name in graph:
        reached[name], ahead = set(), [name]
        while ahead:
            new = graph[ahead.pop()] - reached[name]
            reached[name] |= new
            ahead += new
    found = []
    for name in sorted(graph):
        if name in reached[name] and not any(name in circle for circle in found):
            found.append({other for other in reached[name] if name in reached[other]})
    return found


def test_no_files_lead_to_each_other() -> None:
    assert circles(sources()) == []


def inner_parts(source: str) -> list[str]:
    """What a file asks of an engine beside its public face."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr not in OPEN_TO_FACES:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in ("engine", "_engine"):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("part", sorted(FACES - {"testing"}))
def test_faces_ask_an_engine_for_nothing_inside_it(part: str) -> None:
    paths = [path for path in files() if part_of(path) == part]
    assert paths
    assert {path.name: found for path in paths if (found := inner_parts(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    ["engine.running().scheduler", "service.engine.admission", "self._engine._lifecycle.encoder", "self.engine.inputs"],
)
def test_asking_for_inner_parts_is_noticed(source: str) -> None:
    assert len(inner_parts(source)) == 1


def test_no_circle_at_import() -> None:
    list(TopologicalSorter(graph_of(sources(), deferred=False)).static_order())


def test_connections_know_nothing_of_what_is_served() -> None:
    seen = {each.name for path in (PACKAGE / "server" / "http").glob("*.py") for each in imports_of(path.read_text())}
    assert [name for name in seen if f"{name}.".startswith("asyncllm.server.") and ".server.http" not in name] == []


@pytest.mark.parametrize(
    "second",
    [
        "from asyncllm.server.first import name",
        "from asyncllm.server import first",
        "def f():\n    import asyncllm.server.first",
        "if TYPE_CHECKING:\n    from asyncllm.server.first import Name",
    ],
)
def test_circles_are_noticed(second: str) -> None:
    files = {
        "asyncllm.server.first": "from asyncllm.server.second import f",
        "asyncllm.server.second": second,
        "asyncllm.server.third": "from asyncllm.server import first, second",
    }
    assert circles(files) == [{"asyncllm.server.first", "asyncllm.server.second"}]


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
        ("protocol", "import torch"),
        ("text", "from asyncllm.kernels import rms_norm"),
        ("models", "from asyncllm.agent import executor"),
        ("agent", "from asyncllm import AsyncEngine"),
        ("server", "from asyncllm.engine.schedule.sequence import RequestTimes"),
        ("server", "import asyncllm.engine.schedule.scheduler"),
        ("server", "from asyncllm.http_client.api_client import APIClient"),
        ("pipeline", "from asyncllm.server.run import run"),
        ("http_client", "from asyncllm.cli import main"),
        ("pipeline", "if TYPE_CHECKING:\n    from asyncllm.engine.schedule.scheduler import Scheduler"),
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


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_privates(source: str) -> list[str]:
    """Return the private attributes, and the private names of other modules, that a module uses and does not declare.

    A module declares the methods and fields of its classes: by `def`, by an annotation or by giving `self` a value.
    """
    tree = ast.parse(source)
    declared, used = set[str](), list[ast.Attribute]()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            declared.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            found += [f"line {node.lineno}: {alias.name}" for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                declared.add(node.attr)
            else:
                used.append(node)
    return found + [f"line {node.lineno}: {ast.unparse(node)}" for node in used if node.attr not in declared]


@pytest.mark.parametrize("path", sorted((PACKAGE / "testing").glob("*.py")), ids=lambda path: path.name)
def test_testing_reads_no_private_attribute_of_other_parts(path: Path) -> None:
    assert foreign_privates(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "template._renderer = renderer",
        "class Faulty(Scheduler):\n    def schedule(self):\n        return self._running",
        "class Faulty(Scheduler):\n    def rows(self):\n        return super()._admit()",
        "from asyncllm.text.chat_template import _Renderer",
    ],
)
def test_reaching_into_a_part_is_noticed(source: str) -> None:
    assert len(foreign_privates(source)) == 1


def test_own_fields_are_no_reach() -> None:
    source = """
class Own:
    _a: int

    def __init__(self):
        self._b = self._c()

    def _c(self):
        return self._a + self._b
"""
    assert foreign_privates(source) == []
