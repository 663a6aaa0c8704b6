"""The waiting queue decides which sequence is admitted next.

Lower priority values come first, then earlier requests. Siblings and preempted sequences belong to earlier requests, so
the same rule puts them first within their priority. With quality of service, this order applies within a user, and
`QualityOfService` chooses the user.

No request starves. Once the sequence that has waited longest has waited for `PATIENCE_S`, at most `MAX_PASSED` later
requests in a row are admitted before it. Then it is next, regardless of its user, and it keeps its row as if it
belonged to the highest class. If all sequences have waited that long, one admission in `MAX_PASSED` + 1 is out of
order. The same bound applies to an admitted prompt of which steps compute nothing.

A request that is predicted to miss its deadline yields to all others of its user. It is tried when none of them waits,
the latest deadline first. A queue that is longer than the deadlines allow thus costs only the requests at its end.
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
"""Factor on an answer's predicted time. Running answers slow each other down: if all were scheduled just in time, all
would be late."""

HIGHEST_CLASS = -(2**63)


class Lane:
    """Waiting sequences of one user, ordered by priority, request and index; those expected to be late come last.

    The heaps hold tickets. A sequence may leave from any position; its ticket stays in the heap and is skipped.
    """

    __slots__ = ("_heap", "_late", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}
        """Ticket -> sequence."""
        self._heap: list[tuple[int, int, int, int]] = []
        """(priority, request id, index, ticket)."""
        self._late: list[tuple[int, float, int]] = []
        """(priority, negated deadline, ticket) of sequences expected to be late."""

    def push(self, sequence: Sequence, ticket: int) -> None:
        """Add a sequence under a new `ticket`."""
        request = sequence.request
        self._waiting[ticket] = sequence
        heappush(self._heap, (request.policy.priority, request.id, sequence.index, ticket))

    def first(self, misses_deadline: Callable[[Sequence], bool]) -> Sequence:
        """Return the next sequence. At least one waits."""
        waiting = self._waiting
        while self._heap:
            priority, _, _, ticket = self._heap[0]
            if ticket in waiting:
                sequence = waiting[ticket]
                if not misses_deadline(sequence):
                    return sequence
                deadline = sequence.request.policy.deadline
                assert deadline is not None
                heappush(self._late, (priority, -deadline, ticket))
            heappop(self._heap)
        while self._late[0][-1] not in waiting:
            heappop(self._late)
        return waiting[self._late[0][-1]]

    def remove(self, ticket: int) -> None:
        """Remove a sequence. The number of tickets left behind in the heaps is bounded."""
        waiting = self._waiting
        del waiting[ticket]
        if len(self._heap) + len(self._late) > 2 * len(waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[-1] in waiting]
            self._late = [entry for entry in self._late if entry[-1] in waiting]
            heapify(self._heap)
            heapify(self._late)


class WaitingQueue:
    """Sequences that wait for a row, including preempted ones. Written by the scheduler. No operation gets slower with
    the length of the queue.

    Only the first sequence of a new request waits here. The others follow when the prompt has been computed.
    """

    def __init__(self, quality: QualityOfService | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns the time, in seconds, that deadlines refer to."""
        self.quality = quality if quality is not None and quality.enabled else None
        self._clock = clock
        self.deadlines = Deadlines()
        """Written by the engine loop, as requests end."""
        self._waiting: OrderedDict[Sequence, tuple[float, int, int]] = OrderedDict()
        """Sequence -> (time of its arrival here, known tokens then, ticket); longest wait first."""
        self._lanes: defaultdict[User | None, Lane] = defaultdict(Lane)
        """One lane per user, or a single one without quality of service."""
        self._num_pushed = 0
        self._passed = 0
        """Later requests admitted while the head of `_waiting` has stayed the same."""
        self._passed_rows: dict[int, float] = {}
        """Ids of requests whose prompt the last step left out -> time of the first such step; oldest id first."""
        self._rows_passed = 0
        """Steps that computed prompts of later requests while the head of `_passed_rows` has stayed the same."""
        self.num_requests = 0
        """Requests whose first sequence waits."""
        self.num_tokens = 0
        """Known tokens of the waiting sequences; a prompt counts once for its request."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, for the first time or after a preemption."""
        sequence.keeps_row = False
        is_first = sequence.index == 0
        num_tokens = len(sequence.token_ids) if is_first else sequence.num_generated
        self._num_pushed += 1
        self._waiting[sequence] = self._clock(), num_tokens, self._num_pushed
        user = sequence.request.policy.user
        self._count(user, is_first, num_tokens)
        self._lanes[user].push(sequence, self._num_pushed)
        if self.quality is not None and user is not None:
            self.quality.sequence_waits(user)

    def first(self) -> Sequence | None:
        """Return the next sequence, or None if none waits."""
        if not self._waiting:
            return None
        patient = self._out_of_patience()
        return patient if patient is not None else self._first_by_rule()

    def first_of_groups(self) -> Sequence | None:
        """Return the next sequence by quality of service, for which rows of later groups may be preempted. None without
        quality of service, or if the sequence cannot meet its deadline."""
        if not self._waiting or self.quality is None:
            return None
        first = self._first_by_rule()
        return None if self._misses_deadline(first) else first

    def _first_by_rule(self) -> Sequence:
        """Return the next sequence unless one is out of patience."""
        user = None if self.quality is None else self.quality.next_user()
        return self._lanes[user].first(self._misses_deadline)

    def _out_of_patience(self) -> Sequence | None:
        """Return the sequence that has waited longest, if its turn has come."""
        if self._passed >= MAX_PASSED:
            longest, (since, _, _) = next(iter(self._waiting.items()))
            if self._clock() - since >= PATIENCE_S and not self._misses_deadline(longest):
                return longest
        return None

    def _misses_deadline(self, sequence: Sequence) -> bool:
        deadline = sequence.request.policy.deadline
        return deadline is not None and self._clock() + MARGIN * self.deadlines.seconds(sequence) > deadline

    def admit(self, sequence: Sequence, num_to_compute: int) -> None:
        """Remove a sequence that was admitted. `num_to_compute` of its known tokens are not cached."""
        user = sequence.request.policy.user
        if user is not None and sequence.last_step < 0:
            user.current += num_to_compute
        sequence.keeps_row = sequence is self._out_of_patience()
        longest = next(iter(self._waiting))
        if sequence.request.id > longest.request.id:
            self._passed += 1
        self.discard(sequence)

    def pass_over(self, left: Items[Sequence], chosen: Items[tuple[Sequence, int]]) -> None:
        """Record that a step computes prompts of `chosen` and nothing of `left`, whose sequences also have rows. The
        oldest of these gets precedence after the same patience as in the queue."""
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
        if long_enough and not self._misses_deadline(oldest):
            oldest.keeps_row = True

    def discard(self, sequence: Sequence) -> None:
        """Remove the sequence if it waits."""
        if sequence not in self._waiting:
            return
        if sequence is next(iter(self._waiting)):
            self._passed = 0
        _, num_tokens, ticket = self._waiting.pop(sequence)
        user = sequence.request.policy.user
        self._count(user, -(sequence.index == 0), -num_tokens)
        self._lanes[user].remove(ticket)
        if self.quality is not None and user is not None:
            self.quality.sequence_left(user)

    def clear(self) -> None:
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
        """Charge one more token for each occurrence of a sequence."""
        if self.quality is not None:
            self.quality.expire_use()
            for sequence in sequences:
                user = sequence.request.policy.user
                if user is not None:
                    user.current += 1

    @staticmethod
    def rank(sequence: Sequence) -> int:
        """Return the sequence's class: its user's group, or else its priority. The largest is preempted first."""
        if sequence.keeps_row:
            return HIGHEST_CLASS
        user, priority = sequence.request.policy.user, sequence.request.policy.priority
        return priority if user is None else user.group
