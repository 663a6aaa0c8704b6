"""A chunk goes to the taker as it comes, or to a later reader; none comes twice, or before an earlier one."""

from __future__ import annotations

from asyncllm.engine.requests.delivery import Delivery
from asyncllm.types import Chunk


class Reader:
    """Takes what it is offered while `open`, and counts how often it was called to poll."""

    def __init__(self, delivery: Delivery) -> None:
        self.open = True
        self.taken: list[str] = []
        self.calls = 0
        delivery.taker = self.take
        delivery.listener = self.listen

    def take(self, chunk: Chunk) -> bool:
        if self.open:
            self.taken.append(chunk.text)
        return self.open

    def listen(self) -> None:
        self.calls += 1


def piece(text: str, choice: int = 0) -> Chunk:
    return Chunk(text=text, token_ids=[len(text)], choice=choice)


def test_a_taker_gets_chunks_as_they_come() -> None:
    delivery = Delivery(streaming=True)
    reader = Reader(delivery)
    for text in "abc":
        delivery.put(piece(text))
    assert (reader.taken, reader.calls) == (["a", "b", "c"], 0)
    assert delivery.take() is None
    delivery.end()
    assert reader.calls == 1


def test_what_it_leaves_waits_and_comes_before_later_chunks() -> None:
    delivery = Delivery(streaming=True)
    reader = Reader(delivery)
    delivery.put(piece("a"))
    reader.open = False
    delivery.put(piece("b"))
    delivery.put(piece("x", choice=1))
    reader.open = True
    delivery.put(piece("c"))
    assert (reader.taken, reader.calls) == (["a"], 3), "nothing overtakes what waits"
    first, second = delivery.take(), delivery.take()
    assert first is not None
    assert second is not None
    assert (first.text, first.token_ids, second.text) == ("bc", [1, 1], "x")
    delivery.put(piece("d"))
    assert reader.taken == ["a", "d"]


def test_a_whole_answer_is_not_offered() -> None:
    delivery = Delivery(streaming=False)
    reader = Reader(delivery)
    delivery.put(piece("a"))
    delivery.end()
    assert (reader.taken, reader.calls) == ([], 1)
    whole = delivery.take()
    assert whole is not None
    assert whole.text == "a"


def test_nothing_is_offered_after_the_end() -> None:
    delivery = Delivery(streaming=True)
    reader = Reader(delivery)
    delivery.end()
    delivery.put(piece("a"))
    assert (reader.taken, delivery.take()) == ([], None)
