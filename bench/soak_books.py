"""The books of a soak: what became of every request, as its client, the access log, /metrics and the engine tell it.

In each book, started = finished + failed + cancelled + rejected. A request is in the clients' book once its head has
been sent; those that left before that are none. Books are compared request by request, by X-Request-Id, and only who
left can make a difference between client and server:

    unread      the client left before the server had read the request: no line in the log, and no answer at all
    crossed     the client left, but the server had written its answer before it could know: the log has its status

Both are settled in the clients' book, by the server's word; whatever else differs is an imbalance. /metrics and the
log are of the same server, so that they agree to the request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families
from soak_requests import Asked

__all__ = ["Books", "Outcome", "Record", "outcome_of", "read_log", "read_metrics"]

Outcome = Literal["finished", "failed", "cancelled", "rejected"]
OUTCOMES: tuple[Outcome, ...] = ("finished", "failed", "cancelled", "rejected")

LINE = re.compile(r" INFO asyncllm\.server: \S+ (\S+) (\d{3}) [\d.]+ ms id=(\S+) key=")
WATCHING = ("/metrics",)
"""Routes that the soak itself calls."""
MAX_SHOWN = 20
"""Imbalances that are written out."""


def outcome_of(status: int) -> Outcome:
    """What a status, as the server counts it, says about a request."""
    if status == 499:
        return "cancelled"
    return "finished" if status < 400 else "rejected" if status < 500 else "failed"


def read_log(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Id and status of each request in an access log, in its order."""
    found = (LINE.search(line) for line in lines)
    return [(each[3], int(each[2])) for each in found if each is not None and each[1] not in WATCHING]


def read_metrics(text: str) -> Counter[Outcome]:
    """Requests by how they ended, of what /metrics gives."""
    counts: Counter[Outcome] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "asyncllm:http_requests_total" and sample.labels["route"] not in WATCHING:
                counts[outcome_of(int(sample.labels["status"]))] += int(sample.value)
    return counts


def _book(counts: Mapping[Outcome, int]) -> dict[str, int]:
    return {"started": sum(counts.values()), **{outcome: counts.get(outcome, 0) for outcome in OUTCOMES}}


@dataclass(frozen=True)
class Record:
    """How a request ended, as its client saw it."""

    asked: Asked
    outcome: Outcome
    status: int
    """0: none came."""
    heard: bool
    """Whether a byte of an answer came."""
    left_at: float = 0.0
    """When the client left, by `time.monotonic`; 0: it stayed to the end."""
    complaint: str = ""
    """What was not as it should be."""


@dataclass
class Books:
    """All books of one soak, and what does not agree in them."""

    client: dict[str, int]
    """With `unread` and `crossed` settled."""
    log: dict[str, int]
    metrics: dict[str, int]
    unread: int
    crossed: dict[str, int]
    """By how the server says that they ended."""
    imbalances: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, records: Mapping[str, Record], log: list[tuple[str, int]], metrics: Counter[Outcome]) -> Books:
        """Compare them. `records`: by id."""
        wrong = []
        logged = dict(log)
        for request_id, times in Counter(request_id for request_id, _ in log).items():
            if times > 1:
                wrong.append(f"{request_id} is {times} times in the log")
            if request_id not in records:
                wrong.append(f"{request_id} is in the log, and nobody has sent it")
        unread, crossed, client = 0, Counter[Outcome](), Counter[Outcome]()
        for request_id, record in records.items():
            outcome, left = record.outcome, bool(record.left_at)
            if request_id not in logged:
                if left and not record.heard:
                    unread += 1
                    continue
                wrong.append(f"{request_id} ({record.asked.kind}) is not in the log, and its client saw {outcome}")
            elif (told := outcome_of(logged[request_id])) != outcome:
                if left:
                    crossed[told] += 1
                    outcome = told
                else:
                    wrong.append(
                        f"{request_id} ({record.asked.kind}) is {logged[request_id]} in the log, {outcome} for its "
                        f"client, who got {record.status}"
                    )
            client[outcome] += 1
        books = cls(_book(client), _book(Counter(outcome_of(status) for _, status in log)), _book(metrics), unread, {})
        books.crossed = dict(crossed)
        for name in ("client", "metrics"):
            if getattr(books, name) != books.log:
                wrong.append(f"the books differ: {name} {getattr(books, name)}, log {books.log}")
        books.imbalances = wrong
        return books

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "client": self.client,
            "metrics": self.metrics,
            "access_log": self.log,
            "left_before_the_server_read_them": self.unread,
            "left_and_answered_before_it_was_noticed": self.crossed,
            "imbalances": len(self.imbalances),
            "first_imbalances": self.imbalances[:MAX_SHOWN],
        }
