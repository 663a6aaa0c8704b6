"""The waiting queue: which sequence is admitted next.

Lower priority values come first, then earlier requests. Siblings and preempted sequences belong to requests that
arrived before, so the same rule brings them back to the front of their priority. With quality of service, that is the
order within a user, and `QualityOfService` says whose turn it is.

No request starves: later requests pass over the one that has waited longest at most `MAX_PASSED` times in a row once
it has waited for `PATIENCE_S`; then it is next, whatever its user, and keeps its row as if it belonged to the highest
class. While all wait that long, this moves one admission in `MAX_PASSED` + 1, and the others keep their order. A
prompt that has a row waits as well while steps compute nothing of it, and is passed over no longer than that.

A request that will come too late for its deadline, by the pace of late, lets all others of its user go first. It is
tried when none of them waits, those with the most time left before the rest: so a queue that is longer than deadlines
allow costs the requests at its end, and not all.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from heapq import heapify, heappop, heappush

from asyncllm.engine.schedule.deadlines import Deadlines
from asyncllm.engine.schedule.quality_of_service import QualityOfService, User
from asyncllm.engine.schedule.sequence import Sequence

__all__ = ["MARGIN", "MAX_PASSED", "PATIENCE_S", "WaitingQueue"]

PATIENCE_S = 30.0
MAX_PASSED = 15
MARGIN = 1.5
"""Of an answer's expected time. What slows one down slows all that run; were all of them just in time, all would be
late."""

HIGHEST_CLASS = -(2**63)


class Lane:
    """Waiting sequences by priority, request and index, and behind them those that come too late. The heaps have their
    tickets: those of sequences that left otherwise than from the head are skipped, and keep nothing alive."""

    __slots__ = ("_heap", "_late", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}
        """By ticket."""
        self._heap: list[tuple[int, int, int, int]] = []
        self._late: list[tuple[int, float, int]] = []
        """By priority, and the latest deadline first."""

    def push(self, sequence: Sequence, ticket: int) -> None:
        """Add a sequence; `ticket` is its own."""
        request = sequence.request
        self._waiting[ticket] = sequence
        heappush(self._heap, (request.policy.priority, request.id, sequence.index, ticket))

    def first(self, comes_too_late: Callable[[Sequence], bool]) -> Sequence:
        """Return the head; there is one."""
        waiting = self._waiting
        while self._heap:
            priority, _, _, ticket = self._heap[0]
            if ticket in waiting:
                sequence = waiting[ticket]
                if not comes_too_late(sequence):
                    return sequence
                deadline = sequence.request.policy.deadline
                assert deadline is not None
                heappush(self._late, (priority, -deadline, ticket))
            heappop(self._heap)
        while self._late[0][-1] not in waiting:
            heappop(self._late)
        return waiting[self._late[0][-1]]

    def left(self, ticket: int) -> None:
        """Take out a sequence. Most of them were the head; leftovers of the others do not pile up."""
        waiting = self._waiting
        del waiting[ticket]
        if len(self._heap) + len(self._late) > 2 * len(waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[-1] in waiting]
            self._late = [entry for entry in self._late if entry[-1] in waiting]
            heapify(self._heap)
            heapify(self._late)


class WaitingQueue:
    """Sequences that wait for a row, preempted ones included. Written by the scheduler; nothing depends on its length.

    A request's first sequence stands for it: the others come when its prompt has been computed.
    """

    def __init__(self, quality: QualityOfService | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives the event loop's time, whose beginning is that of `time.monotonic`."""
        self.quality = quality if quality is not None and quality.enabled else None
        self._clock = clock
        self.deadlines = Deadlines()
        """Written by the engine loop, as requests end."""
        self._waiting: OrderedDict[Sequence, tuple[float, int, int]] = OrderedDict()
        """Sequence -> since when it waits, its known tokens then, and its ticket in its lane; who has waited
        longest comes first."""
        self._lanes: defaultdict[User | None, Lane] = defaultdict(Lane)
        """One for each user; without quality of service, one."""
        self._num_pushed = 0
        self._passed = 0
        """Later requests admitted since the one that has waited longest became that."""
        self._passed_rows: dict[int, float] = {}
        """Ids of requests whose prompt the last step has left out -> since when steps do, the oldest first."""
        self._rows_passed = 0
        """Steps that computed prompts of later requests since the oldest of them became that."""
        self.num_requests = 0
        """Requests whose first sequence waits."""
        self.num_tokens = 0
        """Known tokens of the waiting sequences; a prompt counts once for its request."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, for the first time or again."""
        sequence.keeps_row = False
        is_first = sequence.index == 0
        num_tokens = len(sequence.token_ids) if is_first else sequence.num_generated
        self._num_pushed += 1
        self._waiting[sequence] = self._clock(), num_tokens, self._num_pushed
        user = sequence.request.policy.user
        self._count(user, is_first, num_tokens)
        self._lanes[user].push(sequence, self._num_pushed)
        if self.quality is not None and user is not None:
            self.quality.joins(user)

    def first(self) -> Sequence | None:
        """Return the sequence that is next; None if none waits."""
        if not self._waiting:
            return None
        patient = self._out_of_patience()
        return patient if patient is not None else self._first_by_rule()

    def first_of_groups(self) -> Sequence | None:
        """Return the sequence that is next by quality of service, for which rows are taken from later groups; None if
        there is none, or it comes too late in any case."""
        if not self._waiting or self.quality is None:
            return None
        first = self._first_by_rule()
        return None if self._comes_too_late(first) else first

    def _first_by_rule(self) -> Sequence:
        """Return the sequence that is next unless one is out of patience."""
        user = None if self.quality is None else self.quality.next_user()
        return self._lanes[user].first(self._comes_too_late)

    def _out_of_patience(self) -> Sequence | None:
        """Return the sequence that has waited longest, if it is its turn."""
        if self._passed >= MAX_PASSED:
            longest, (since, _, _) = next(iter(self._waiting.items()))
            if self._clock() - since >= PATIENCE_S and not self._comes_too_late(longest):
                return longest
        return None

    def _comes_too_late(self, sequence: Sequence) -> bool:
        deadline = sequence.request.policy.deadline
        return deadline is not None and self._clock() + MARGIN * self.deadlines.seconds(sequence) > deadline

    def admit(self, sequence: Sequence, num_to_compute: int) -> None:
        """Take out a sequence that got its row; so many of its known tokens are to be computed."""
        user = sequence.request.policy.user
        if user is not None and sequence.last_step < 0:
            user.current += num_to_compute
        sequence.keeps_row = sequence is self._out_of_patience()
        longest = next(iter(self._waiting))
        if sequence.request.id > longest.request.id:
            self._passed += 1
        self.discard(sequence)

    def pass_over(self, left: Items[Sequence], chosen: Items[tuple[Sequence, int]]) -> None:
        """Note that a step computes the prompts of `chosen`, and not those of `left`, which have rows as well. The
        oldest of these loses patience as in the queue, and comes first then."""
        if not left:
            self._passed_rows.clear()
            return
        now = self._clock()
        before = next(iter(self._passed_rows), None)
        by_age = sorted(left, key=lambda sequence: sequence.request.id)
        ids = [sequence.request.id for sequence in by_age]
        self._passed_rows = {id_: self._passed_rows.get(id_, now) for id_ in ids}
        oldest = by_age[0]
        if ids[0] != before:
            self._rows_passed = 0
        if any(sequence.request.id > ids[0] for sequence, _ in chosen):
            self._rows_passed += 1
        long_enough = now - self._passed_rows[ids[0]] >= PATIENCE_S and self._rows_passed >= MAX_PASSED
        if long_enough and not self._comes_too_late(oldest):
            oldest.keeps_row = True

    def discard(self, sequence: Sequence) -> None:
        """Take out the sequence, if it waits."""
        if sequence not in self._waiting:
            return
        if sequence is next(iter(self._waiting)):
            self._passed = 0
        _, num_tokens, ticket = self._waiting.pop(sequence)
        user = sequence.request.policy.user
        self._count(user, -(sequence.index == 0), -num_tokens)
        self._lanes[user].left(ticket)
        if self.quality is not None and user is not None:
            self.quality.leaves(user)

    def let_go(self) -> None:
        """Forget all sequences: the engine has ended."""
        self._waiting.clear()
        self._lanes.clear()

    def _count(self, user: User | None, requests: int, tokens: int) -> None:
        self.num_requests += requests
        self.num_tokens += tokens
        if user is not None:
            user.queued_requests += requests
            user.queued_tokens += tokens

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Each of these got one more token, which counts as used."""
        if self.quality is not None:
            self.quality.move_on()
            for sequence in sequences:
                user = sequence.request.policy.user
                if user is not None:
                    user.current += 1

    @staticmethod
    def rank(sequence: Sequence) -> int:
        """Return the sequence's class, its user's group or else its priority: the highest is preempted first."""
        if sequence.keeps_row:
            return HIGHEST_CLASS
        user, priority = sequence.request.policy.user, sequence.request.policy.priority
        return priority if user is None else user.group
