"""README.md, DESIGN.md and docs/ name files, families, links and programs; they exist, and agree with the code.

Docstrings and comments say plainly who does what: no riddle words, and a function's begins with what it does.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from asyncllm.agent.cache.pool import CPU_POOL_BYTES
from asyncllm.agent.step.graph_sizes import LARGEST_MIXED
from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.schedule.waiting_queue import MAX_PASSED, PATIENCE_S
from asyncllm.models.refused import REFUSED_TEXT_MODELS
from asyncllm.models.registry import families
from asyncllm.testing.faults import Point
from tests.models import table
from tests.test_layering import LEVEL

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncllm"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

RIDDLES = re.compile(r"\b(who(m|s)?ever|somebody|nobody|anybody)\b", re.IGNORECASE)
"""Words that stand for one that has a name: a client, a caller, a row, a thread."""

NO_VERBS = {"How", "That", "Those", "What", "Where", "Whether", "Which", "Who", "Whose"}
"""Words with which a description of a value begins. Of a property or field that is right; a function returns it."""

NO_PATHS = {"BENCHLOG.md", "CHANGELOG.md"}
"""They tell of the past."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def paths_in(text: str) -> Iterator[str]:
    """Words between backticks that look like paths of this repository."""
    for code in re.findall(r"`([^`\n]+)`", text):
        for word in code.split():
            if re.fullmatch(r"(?:[\w-]+/)*[\w-]+\.(?:py|md)|(?:[\w-]+/)+", word):
                yield word


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name not in NO_PATHS], ids=name)
def test_named_files_and_folders_exist(document: Path) -> None:
    places = (ROOT, PACKAGE, document.parent)
    text = document.read_text(encoding="utf-8")
    to_write = re.findall(r"Write `([^`]+)`", text)
    named = [path for path in paths_in(text) if path not in to_write]
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


def test_a_file_that_has_moved_is_noticed() -> None:
    text = "See `engine/loop/turns.py` and `python bench/quality.py --noise 0.05`, `n/a`, `agent/` and `a + b`."
    assert list(paths_in(text)) == ["engine/loop/turns.py", "bench/quality.py", "agent/"]


def test_named_classes_exist() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    documents = [ROOT / "DESIGN.md", ROOT / "docs" / "glossary.md", *(ROOT / "docs" / "design").glob("*.md")]
    for document in documents:
        named = re.findall(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)?)`", document.read_text(encoding="utf-8"))
        assert [each for each in named if not words.issuperset(each.split("."))] == [], name(document)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name not in NO_PATHS], ids=name)
def test_named_modules_and_their_names_exist(document: Path) -> None:
    named = re.findall(r"`(asyncllm(?:\.\w+)+)`", document.read_text(encoding="utf-8"))
    for each in named:
        pkgutil.resolve_name(each)


def test_figures_of_the_code_are_those_of_the_pages() -> None:
    assert len(get_args(Point)) == 11
    said = {
        "docs/library.md": "any of eleven points",
        "docs/promises.md": "| 11 points, raise, sleep, corrupt |",
        "docs/design/testing.md": "at eleven named points",
        "docs/design/agent.md": f"Beyond {LARGEST_MIXED:,} tokens a step takes longer than its launches",
        "docs/design/cache.md": f"takes at most {CPU_POOL_BYTES // 2**30} GiB",
        "docs/design/engine.md": f"for {PATIENCE_S:g} s, at most {MAX_PASSED} later ones in a row",
    }
    for document, figure in said.items():
        assert figure in (ROOT / document).read_text(encoding="utf-8"), f"{document} does not say: {figure}"


def test_the_layers_of_the_design_are_those_that_imports_follow() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "DESIGN.md").read_text(encoding="utf-8"), re.MULTILINE)
    layers = [[part.removesuffix(".py").strip("/") for part in re.findall(r"`([^`]+)`", row)] for row in rows]
    levels = [LEVEL[part] for layer in layers for part in layer]
    assert levels == sorted(levels, reverse=True)
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(part for layer in layers for part in layer) == sorted(parts - {"__init__", "__main__"})


@pytest.mark.parametrize(("heading", "config"), [("engine", EngineConfig), ("answer", GenerationConfig)])
def test_settings_that_keep_their_name_exist(heading: str, config: type[EngineConfig] | type[GenerationConfig]) -> None:
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    section = re.split(rf"## Settings of (?:an|the) {heading}", text)[1].partition("\n## ")[0]
    kept = re.findall(r"^\| (`.*?) \| the same", section, re.MULTILINE)
    names = {each for row in kept for each in re.findall(r"`(\w+)", row)}
    assert len(names) >= 7
    assert names <= set(config.__struct_fields__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_programs_are_python(document: Path) -> None:
    for program in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        compile(program, name(document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 900


def test_the_page_of_models_is_that_of_the_code() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.text(), "run python -m tests.models.table"
    rows = re.findall(r"^\| (`\w+`.*?) \| (.*?) \|", page, re.MULTILINE)
    assert [name for names, _ in rows for name in re.findall(r"\w+", names)] == [*families(), *REFUSED_TEXT_MODELS]
    assert [name for name, models in rows if not models] == []


def riddles_in(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if RIDDLES.search(line)]


def functions_without_verb(source: str) -> Iterator[str]:
    """Yield the functions whose docstring begins with no verb, properties apart."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("property" in ast.unparse(each) for each in node.decorator_list):
            continue
        docstring = ast.get_docstring(node)
        if docstring and docstring.split()[0] in NO_VERBS:
            yield f"{node.name}: {docstring.splitlines()[0]}"


def test_sentences_name_their_subject() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert riddles_in(source) == [], path
        assert list(functions_without_verb(source)) == [], path


def test_riddles_are_noticed() -> None:
    assert riddles_in("# Whoever asks waits.\nnot_whoever = 1\n'''Nobody waits.'''") == [
        "# Whoever asks waits.",
        "'''Nobody waits.'''",
    ]
    function = "def f():\n    '''Whether it waits.'''\n"
    assert list(functions_without_verb(function)) == ["f: Whether it waits."]
    assert list(functions_without_verb(f"@property\n{function}def g():\n    '''Return whether it waits.'''\n")) == []
