"""Limits on the sizes of files and functions: a file or function beyond one has a written reason.

A file or function beyond a limit is two things, and is split; or it is one thing, and its line in `REASONS` says why
that takes as much. Triton kernels have limits of their own: a kernel's body cannot be split where its registers live,
and its arguments are addresses and strides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncllm"
FOLDERS = ("asyncllm", "tests", "bench", "examples")

MOST = {
    "lines": 600,
    "acting classes": 4,
    "imported files": 20,
    "lines of a function": 60,
    "parameters": 12,
    "positional parameters": 8,
    "nested blocks": 4,
}
"""By measure. A class acts if it is public and has a public method: records, errors and formats of messages belong
together by the dozen. Lines of a function are those of its body without its docstring."""
MOST_OF_A_KERNEL = {"lines of a function": 150, "parameters": 32, "positional parameters": 32, "nested blocks": 4}
"""Of functions that Triton compiles."""
FEWEST_LINES = 20
"""A file below that is a part of another one."""

REASONS = {
    ("acting classes", "layers/block.py"): "the ways in which branches join the residual stream",
    ("acting classes", "protocol.py"): "all that engine and agent say to each other, on one page",
    ("imported files", "models/vision_language.py"): "the table of all families with images",
    ("imported files", "server/routes.py"): "the table of all routes",
    ("nested blocks", "engine/requests/batches.py:interleave"): "all answers end with the reader, each with its own",
    ("nested blocks", "models/loading/stream.py:_receive"): "one loop keeps readers, buffers and the device busy",
    ("parameters", "engine/schedule/sequence.py:__init__"): "a record of a request's fields",
    ("parameters", "http_client/api_client.py:chat_completions_v1"): "LMDeploy's signature",
    ("parameters", "http_client/api_client.py:chat_interactive_v1"): "LMDeploy's signature",
    ("parameters", "http_client/api_client.py:completions_v1"): "LMDeploy's signature",
    ("parameters", "testing/fake_device.py:__init__"): "what a model side says of itself, all by keyword",
    ("parameters", "testing/fake_executor.py:__init__"): "knobs for users' tests, all by keyword",
    ("parameters", "text/templates/composed.py:__init__"): "LMDeploy's signature",
    ("positional parameters", "http_client/__init__.py:serve"): "LMDeploy's signature",
    ("positional parameters", "http_client/api_client.py:chat_completions_v1"): "LMDeploy's signature",
    ("positional parameters", "http_client/api_client.py:chat_interactive_v1"): "LMDeploy's signature",
    ("positional parameters", "http_client/api_client.py:completions_v1"): "LMDeploy's signature",
    ("positional parameters", "kernels/triton/attention/launch.py:launch_attention"): "attention's own arguments",
    ("positional parameters", "text/templates/composed.py:__init__"): "LMDeploy's signature",
}
"""Why one thing is that large, by measure and place."""

SHORT = {
    "__main__.py": "`python -m asyncllm`",
    "messages.py": "LMDeploy's import path",
    "pytorch.py": "LMDeploy's import path",
    "serve/proxy/proxy.py": "LMDeploy's import path",
    "vl/constants.py": "LMDeploy's import path",
}
"""Why so little is a file of its own. What only marks a folder needs no reason."""

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def depth(node: ast.AST) -> int:
    """Return how many blocks lie within each other below `node`; `elif` and inner functions add none."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, INNER):
            continue
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, (isinstance(child, BLOCKS) and not is_elif) + depth(child))
    return deepest


def acts(node: ast.stmt) -> bool:
    """Whether this is a public class with a public method."""
    return (
        isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any(isinstance(each, INNER[:2]) and not each.name.startswith("_") for each in node.body)
    )


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, int]:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    assert node.end_lineno is not None
    arguments = node.args
    positional = [each for each in (*arguments.posonlyargs, *arguments.args) if each.arg not in ("self", "cls")]
    return {
        "lines of a function": node.end_lineno - body[0].lineno + 1 if body else 0,
        "parameters": len(positional) + len(arguments.kwonlyargs),
        "positional parameters": len(positional),
        "nested blocks": depth(node),
    }


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(each) for each in node.decorator_list)


def measured(source: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield measure, function ("" for the file), number and the most that passes without a reason."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    imported = {
        each.module
        for each in nodes
        if isinstance(each, ast.ImportFrom) and each.module is not None and each.module.startswith("asyncllm.")
    }
    numbers = {
        "lines": len(source.splitlines()),
        "acting classes": sum(map(acts, tree.body)),
        "imported files": len(imported),
    }
    for measure, number in numbers.items():
        yield measure, "", number, MOST[measure]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            most = MOST_OF_A_KERNEL if is_kernel(node) else MOST
            for measure, number in of_function(node).items():
                yield measure, node.name, number, most[measure]


def excesses(source: str) -> dict[tuple[str, str], int]:
    """Return what passes its number, by measure and function."""
    found: dict[tuple[str, str], int] = {}
    for measure, name, number, most in measured(source):
        if number > most:
            found[measure, name] = max(number, found.get((measure, name), 0))
    return found


def in_package() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def place_of(path: Path, name: str = "") -> str:
    return path.relative_to(PACKAGE).as_posix() + (f":{name}" if name else "")


def test_what_is_large_has_a_reason_and_no_reason_is_left_over() -> None:
    found = {
        (measure, place_of(path, name)): number
        for path in in_package()
        for (measure, name), number in excesses(path.read_text(encoding="utf-8")).items()
    }
    assert {place: number for place, number in found.items() if place not in REASONS} == {}
    assert REASONS.keys() - found.keys() == set()


def test_what_is_small_has_a_reason() -> None:
    sizes = {place_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in in_package()}
    markers = {place for place in sizes if place.endswith("__init__.py")} - SHORT.keys()
    assert {place for place, lines in sizes.items() if lines < FEWEST_LINES} - markers == SHORT.keys()


def test_tests_and_programs_are_short() -> None:
    paths = sorted(path for folder in FOLDERS[1:] for path in (ROOT / folder).rglob("*.py"))
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {place: lines for place, lines in sizes.items() if lines > MOST["lines"]} == {}


@pytest.mark.parametrize(
    ("measure", "source"),
    [
        ("lines", "pass\n" * 601),
        ("acting classes", "\n".join(f"class A{number}:\n    def act(self): ..." for number in range(5))),
        ("imported files", "\n".join(f"from asyncllm.a{number} import b" for number in range(21))),
        ("lines of a function", "def f():\n" + "    pass\n" * 61),
        ("parameters", f"def f(*, {', '.join(f'a{number}' for number in range(13))}): ..."),
        ("positional parameters", "def f(a, b, c, d, e, f, g, h, i): ..."),
        ("nested blocks", "def f():\n if a:\n  for b in c:\n   with d:\n    while e:\n     if g: ..."),
    ],
)
def test_excess_is_noticed(measure: str, source: str) -> None:
    assert [found for found, _ in excesses(source)] == [measure]


def test_what_is_no_excess() -> None:
    records = "\n".join(f"class A{number}(Record):\n    a: int" for number in range(9))
    choices = "def f():\n    if a: ...\n" + "    elif b: ...\n" * 9
    documented = 'def f():\n    """' + "\n" * 99 + '"""\n'
    method = "class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."
    kernel = "@triton.jit\ndef f():\n" + "    pass\n" * 100
    for source in (records, choices, documented, method, kernel):
        assert excesses(source) == {}
