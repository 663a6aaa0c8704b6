"""The waiting queue: which sequence is admitted next.

Lower priority values come first, then earlier requests. Siblings and preempted sequences belong to requests that
arrived before, so the same rule brings them back to the front of their priority. With quality of service, that is the
order within a user, and `QualityOfService` says whose turn it is.

Nobody starves: whoever has waited longest is passed over by later requests at most `MAX_PASSED` times in a row once it
has waited for `PATIENCE_S`; then it is next, whoever it belongs to, and keeps its row as if it belonged to the highest
class. While everybody waits that long, this moves one admission in `MAX_PASSED` + 1, and the others keep their order.

Whoever will come too late for its deadline, by the pace of late, lets all others of its user go first. It is tried when
none of them waits, those with the most time left before the rest: so a queue that is longer than deadlines allow costs
those at its end, and not everybody.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from heapq import heapify, heappop, heappush

from asyncllm.engine.pace import Pace
from asyncllm.engine.quality_of_service import QualityOfService, User
from asyncllm.engine.sequence import Sequence

__all__ = ["MARGIN", "MAX_PASSED", "PATIENCE_S", "WaitingQueue"]

PATIENCE_S = 30.0
MAX_PASSED = 15
MARGIN = 1.5
"""Of an answer's expected time. What slows one down slows all that run; were all of them just in time, all would be
late."""

HIGHEST_CLASS = -(2**63)


class Lane:
    """Waiting sequences by priority, request and index, and behind them those that come too late. Those that left
    otherwise than from its head are skipped."""

    __slots__ = ("_heap", "_late", "num_waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Sequence]] = []
        self._late: list[tuple[int, float, int, Sequence]] = []
        """By priority, and the latest deadline first."""
        self.num_waiting = 0
        """Entries that are no leftovers."""

    def push(self, sequence: Sequence, ticket: int) -> None:
        """Add a sequence; `ticket` is unique, so that sequences themselves are never compared."""
        request = sequence.request
        heappush(self._heap, (request.terms.priority, request.id, sequence.index, ticket, sequence))
        self.num_waiting += 1

    def first(self, waiting: Container[Sequence], comes_too_late: Callable[[Sequence], bool]) -> Sequence:
        """The head; there is one."""
        while self._heap:
            priority, _, _, ticket, sequence = self._heap[0]
            if sequence in waiting:
                if not comes_too_late(sequence):
                    return sequence
                deadline = sequence.request.terms.deadline
                assert deadline is not None
                heappush(self._late, (priority, -deadline, ticket, sequence))
            heappop(self._heap)
        while self._late[0][-1] not in waiting:
            heappop(self._late)
        return self._late[0][-1]

    def left(self, waiting: Container[Sequence]) -> None:
        """One sequence does not wait any more. Most of them were the head; leftovers of the others do not pile up."""
        self.num_waiting -= 1
        if len(self._heap) + len(self._late) > 2 * self.num_waiting + 64:
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
        self.pace = Pace()
        """Written by the engine loop, as requests end."""
        self._waiting: OrderedDict[Sequence, tuple[float, int]] = OrderedDict()
        """Sequence -> since when it waits, and its known tokens then; who has waited longest comes first."""
        self._lanes: defaultdict[User | None, Lane] = defaultdict(Lane)
        """One for each user; without quality of service, one."""
        self._num_pushed = 0
        self._passed = 0
        """Later requests admitted since the one that has waited longest became that."""
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
        self._waiting[sequence] = self._clock(), num_tokens
        self._num_pushed += 1
        user = sequence.request.terms.user
        self._count(user, is_first, num_tokens)
        self._lanes[user].push(sequence, self._num_pushed)
        if self.quality is not None and user is not None:
            self.quality.joins(user)

    def first(self) -> Sequence | None:
        """Who is next; None if nobody waits."""
        if not self._waiting:
            return None
        patient = self._out_of_patience()
        return patient if patient is not None else self._first_by_rule()

    def first_of_groups(self) -> Sequence | None:
        """Who is next by quality of service, for whom rows are taken from groups that come after its own; None if
        nobody is, or it comes too late in any case."""
        if not self._waiting or self.quality is None:
            return None
        first = self._first_by_rule()
        return None if self._comes_too_late(first) else first

    def _first_by_rule(self) -> Sequence:
        """Who is next unless somebody loses patience."""
        user = None if self.quality is None else self.quality.next_user()
        return self._lanes[user].first(self._waiting, self._comes_too_late)

    def _out_of_patience(self) -> Sequence | None:
        """Who has waited longest, if it is that one's turn."""
        if self._passed >= MAX_PASSED:
            longest, (since, _) = next(iter(self._waiting.items()))
            if self._clock() - since >= PATIENCE_S and not self._comes_too_late(longest):
                return longest
        return None

    def _comes_too_late(self, sequence: Sequence) -> bool:
        deadline = sequence.request.terms.deadline
        return deadline is not None and self._clock() + MARGIN * self.pace.seconds(sequence) > deadline

    def admit(self, sequence: Sequence, num_to_compute: int) -> None:
        """The sequence got its row; so many of its known tokens are to be computed."""
        user = sequence.request.terms.user
        if user is not None and sequence.last_step < 0:
            user.current += num_to_compute
        sequence.keeps_row = sequence is self._out_of_patience()
        longest = next(iter(self._waiting))
        if sequence.request.id > longest.request.id:
            self._passed += 1
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """The sequence does not wait any more, if it did."""
        if sequence not in self._waiting:
            return
        if sequence is next(iter(self._waiting)):
            self._passed = 0
        _, num_tokens = self._waiting.pop(sequence)
        user = sequence.request.terms.user
        self._count(user, -(sequence.index == 0), -num_tokens)
        self._lanes[user].left(self._waiting)
        if self.quality is not None and user is not None:
            self.quality.leaves(user)

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
                user = sequence.request.terms.user
                if user is not None:
                    user.current += 1

    @staticmethod
    def rank(sequence: Sequence) -> int:
        """The sequence's class, which is its user's group or else its priority: the highest is preempted first."""
        if sequence.keeps_row:
            return HIGHEST_CLASS
        user, priority = sequence.request.terms.user, sequence.request.terms.priority
        return priority if user is None else user.group
