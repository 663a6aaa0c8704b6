"""Invariants of a scheduler between any two calls, for tests and for an idle engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request, SequenceState

__all__ = ["check_idle", "check_integrity"]


def check_integrity(scheduler: Scheduler, requests: Iterable[Request] = ()) -> None:
    """Raise AssertionError unless rows, slots, blocks, the queue and the given `requests` agree."""
    running = scheduler._running
    scheduler.blocks.check_integrity(sequence.blocks for sequence in running)
    scheduler.host.check_integrity()
    adapters = [sequence.request.adapter for sequence in running]
    scheduler.adapters.check_integrity(Counter(each.number for each in adapters if each is not None))
    scheduler.slots.check_integrity([sequence.slot for sequence in running])
    known = dict.fromkeys(sequence.request for sequence in (*running, *scheduler.waiting))
    # Siblings whose leader has not finished the prompt also count as waiting.
    states = [sequence.state for request in known for sequence in request.sequences]
    waiting = states.count(SequenceState.WAITING) + states.count(SequenceState.SWAPPED)
    assert waiting == scheduler.num_waiting, f"{scheduler.num_waiting} sequences are counted as waiting, {waiting} wait"
    assert set(scheduler._prefilling) == {
        sequence for sequence in running if sequence.state is SequenceState.PREFILL
    }, "the prefilling sequences are not those in state PREFILL"
    for request in requests:
        for sequence in request.sequences:
            held = sequence.state in (SequenceState.PREFILL, SequenceState.DECODE)
            assert held == (sequence in running), f"{sequence!r} and its row disagree"
            swapped = sequence.state is SequenceState.SWAPPED
            assert swapped == (sequence in scheduler.host.swapped), f"{sequence!r} and the host's blocks disagree"


def check_idle(scheduler: Scheduler, num_open: int, *, num_in_flight: int) -> None:
    """Raise AssertionError if a request is open, or a row or block is held that no step in flight may write."""
    assert num_open == 0, f"{num_open} requests are open"
    check_integrity(scheduler)
    assert scheduler.num_running == 0, "rows are held"
    assert scheduler.num_waiting == 0, "sequences are waiting"
    held = scheduler.blocks.num_held + scheduler.host.blocks.num_held
    assert held == 0 or num_in_flight, f"{held} blocks are held, and no step is in flight that may write them"
