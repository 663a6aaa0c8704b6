"""Channel: messages of any size arrive whole, in order, with their descriptors; an end is told once."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
import torch

from asyncllm.errors import ContextLengthExceeded, InvalidParameter, QueueFull
from asyncllm.protocol import StepDropped, StepFailed, StepOutput
from asyncllm.ranks.channel import Channel
from asyncllm.ranks.messages import Failure, StepDone, decode_from_rank, encode
from asyncllm.ranks.shared_tensors import map_tensors, share_tensors

pytestmark = pytest.mark.anyio


class End:
    """One end of a pair, with what arrives there."""

    def __init__(self, end: socket.socket) -> None:
        self.messages: list[bytes] = []
        self.ends = 0
        self.changed = asyncio.Event()
        self.channel = Channel(end, self._take, self._end)

    def _take(self, data: memoryview) -> None:
        self.messages.append(bytes(data))
        self.changed.set()

    def _end(self) -> None:
        self.ends += 1
        self.changed.set()

    async def until(self, count: int) -> list[bytes]:
        """Wait until so many messages have arrived, or the other end is closed."""
        while len(self.messages) < count and not self.ends:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 20)
        return self.messages


async def test_messages_arrive_whole_and_in_order() -> None:
    left, right = map(End, socket.socketpair())
    sent = [os.urandom(size) for size in (0, 1, 7, 300_000, 8, 5_000_000, 3)]
    for message in sent:
        left.channel.send(message)
    right.channel.send(b"back")
    assert await right.until(len(sent)) == sent
    assert await left.until(1) == [b"back"]
    left.channel.close()
    right.channel.close()


async def test_descriptors_come_with_their_messages() -> None:
    left, right = map(End, socket.socketpair())
    left.channel.send(os.urandom(3_000_000))
    for text in (b"one", b"two"):
        reading, writing = os.pipe()
        os.write(writing, text)
        left.channel.send(b"", (reading,))
        os.close(reading)
        os.close(writing)
    await right.until(3)
    for text in (b"one", b"two"):
        descriptor = right.channel.descriptors.popleft()
        assert os.read(descriptor, 10) == text
        os.close(descriptor)
    left.channel.close()
    right.channel.close()


async def test_an_end_is_told_once_and_leaves_nothing_open() -> None:
    left, right = map(End, socket.socketpair())
    left.channel.send(b"last")
    reading, writing = os.pipe()
    left.channel.send(b"with a descriptor", (reading,))
    os.close(reading)
    os.close(writing)
    left.channel.close()
    left.channel.close()
    left.channel.send(b"after the end")
    await right.until(3)
    assert (right.messages, right.ends) == ([b"last", b"with a descriptor"], 1)
    right.channel.send(b"into the void")
    assert right.channel.closed
    assert left.ends == 0


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameter("not this", "tags"),
        QueueFull("later", 2.0),
        ContextLengthExceeded(5, 4, "the model"),
        StepDropped("lost"),
    ],
)
async def test_errors_say_the_same_in_another_process(error: Exception) -> None:
    arrived = Failure.of(error).error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert getattr(arrived, "param", None) == getattr(error, "param", None)


async def test_causes_come_along_with_their_traceback() -> None:
    failed = StepFailed("a step failed")
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError as cause:
        failed.__cause__ = cause
    arrived = Failure.of(failed).error()
    assert isinstance(arrived, StepFailed)
    assert str(arrived.__cause__) == "ZeroDivisionError: by nothing"
    assert "raise ZeroDivisionError" in arrived.__cause__.__notes__[0]


async def test_tensors_of_a_result_arrive_as_they_were() -> None:
    logits = torch.randn(3, 5)
    output = StepOutput(step=4, slots=[1], tokens=[2], logits={1: logits, 2: torch.empty(0, 5)}, pooled={1: [0.5]})
    done = decode_from_rank(encode(StepDone(4, output)))
    assert isinstance(done, StepDone)
    assert done.output is not None
    assert torch.equal(done.output.logits[1], logits)
    assert done.output.logits[2].shape == (0, 5)
    assert done.output.pooled == {1: [0.5]}


async def test_shared_tensors_are_equal_and_independent_of_their_source() -> None:
    tensors = {
        "a": torch.randn(3, 7).t(),
        "b": torch.arange(5, dtype=torch.int32),
        "c": torch.randn(4, 4).bfloat16(),
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }
    descriptor, described = share_tensors(tensors)
    mapped = map_tensors(descriptor, described)
    os.close(descriptor)
    assert list(mapped) == list(tensors)
    for name, tensor in tensors.items():
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name], tensor)
    mapped["b"].zero_()
    assert tensors["b"].tolist() == [0, 1, 2, 3, 4]
