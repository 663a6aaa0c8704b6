"""Results on their way to the host: what arrives, and that it may be overwritten behind the download."""

from __future__ import annotations

import pytest
import torch

from asyncllm.agent.device.streams import Streams


def test_what_arrived_does_not_follow_the_device() -> None:
    transfers = Streams(torch.device("cpu"))
    with transfers.computing():
        numbers, flags = torch.arange(6, dtype=torch.int32).view(2, 3), torch.zeros(0, dtype=torch.int32)
        arrived, event = transfers.download([numbers, flags])
        transfers.wait_for_downloads()
        numbers.fill_(-1)
    assert event is None, "it is there already"
    assert [tensor.tolist() for tensor in arrived] == [[[0, 1, 2], [3, 4, 5]], []]


@pytest.mark.gpu
def test_fixed_tensors_may_be_written_anew_behind_their_download() -> None:
    transfers = Streams(torch.device("cuda"))
    downloads = []
    with transfers.computing():
        fixed = torch.zeros(2**20, device="cuda")
        for number in range(20):
            # Without it a download would find numbers of later turns.
            transfers.wait_for_downloads()
            fixed.fill_(number)
            downloads.append(transfers.download([fixed]))
    for number, ((arrived,), event) in enumerate(downloads):
        assert event is not None
        event.synchronize()
        assert arrived.is_pinned()
        assert arrived.eq(number).all()


@pytest.mark.gpu
def test_streams_are_used_again() -> None:
    first = Streams(torch.device("cuda"))
    second = Streams(torch.device("cuda"))
    assert first.stream is not None
    assert first.stream != second.stream
    stream = first.stream
    del first
    assert Streams(torch.device("cuda")).stream == stream
