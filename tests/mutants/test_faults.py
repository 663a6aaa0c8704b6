"""The faults that `tests/mutants/run` applies still fit the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.answering import ANSWERING
from tests.mutants.blocks import BLOCKS
from tests.mutants.noticing import TESTS
from tests.mutants.scheduling import SCHEDULING

MUTANTS = SCHEDULING + BLOCKS + ANSWERING
PACKAGE = Path(__file__).resolve().parent.parent.parent / "asyncllm"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}-{mutant.breaks}")
def test_it_applies_at_one_place_and_is_python(mutant) -> None:
    path = PACKAGE / mutant.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutant.fragment) == 1, f"write the fault anew: {mutant.fragment!r}"
    assert mutant.replacement != mutant.fragment
    compile(source.replace(mutant.fragment, mutant.replacement), str(path), "exec")


def test_there_are_enough_of_them_and_each_is_described() -> None:
    assert len(MUTANTS) >= 100
    assert len({(mutant.file, mutant.breaks) for mutant in MUTANTS}) == len(MUTANTS)


def test_tests_are_named_for_each_faulty_file() -> None:
    assert {mutant.file for mutant in MUTANTS} == TESTS.keys()
    for names in TESTS.values():
        for name in names.split():
            assert (PACKAGE.parent / "tests" / "engine" / f"{name}.py").is_file()
