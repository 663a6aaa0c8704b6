"""bench/step_profile.py: which time counts for which kernel."""

from __future__ import annotations

import pytest

from bench.step_profile import IDLE, Record, own_times, parse_arguments


def test_a_kernel_owns_what_no_earlier_one_takes() -> None:
    records = [Record(100, 140, "a"), Record(110, 160, "early"), Record(200, 230, "a"), Record(205, 220, "within")]
    times = own_times(records)
    assert times.own_ns == {"a": 40 + 10, "early": 20, "within": 15, IDLE: 40 + 5}
    assert times.launches == {"a": 2, "early": 1, "within": 1}
    assert sum(times.own_ns.values()) == 230 - 100


def test_a_step_is_what_whole_answers_have_more() -> None:
    first = own_times([Record(0, 1000, "prompt"), Record(1000, 3000, "both")])
    whole = own_times([Record(0, 1000, "prompt"), Record(1000, 3000, "both"), Record(3000, 7000, "both")])
    assert whole.less(first, 2) == [("both", 2.0, 0.5), (IDLE, 0.0, 0.0), ("prompt", 0.0, 0.0)]
    assert own_times([]).own_ns == {IDLE: 0}


def test_works_without_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(["--model", "tiny-chat", "--work", "b4,prefill"]).work == "b4,prefill"
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "tiny-chat", "--work", "mix"])
    assert "has no steps of one size" in capsys.readouterr().err
