"""Uploads: what arrives, where, and that pinned memory is not written again too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncllm.agent.device.streams import offsets, upload, upload_together
from tests.kernels.device import DEVICE

ARRAYS: list[NDArray[Any]] = [
    np.arange(5, dtype=np.int32),
    np.zeros(0, np.int64),
    np.arange(6, dtype=np.float64).reshape(2, 3),
    np.array([[7, 8], [9, 10]], np.int64).T,
    np.array([0.5], np.float32),
]


@pytest.mark.parametrize("fixed", [False, True])
def test_arrays_arrive_together(fixed: bool) -> None:
    places = offsets(ARRAYS)
    assert places == [0, 32, 32, 80, 112, 128]
    into = torch.full((200,), 255, dtype=torch.uint8, device=DEVICE) if fixed else None
    tensors = upload_together(ARRAYS, DEVICE, into)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert tensor.device.type == DEVICE.type
        assert torch.equal(tensor.cpu(), torch.from_numpy(array.copy()))
    if into is None and DEVICE.type == "cpu":
        # They are there: a copy would only take time.
        assert all(
            one.data_ptr() == array.ctypes.data for array, one in zip(ARRAYS, tensors, strict=True) if array.size
        )
        return
    starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors if tensor.numel()]
    assert starts == [0, 32, 80, 112]
    if into is not None:
        assert into.data_ptr() == tensors[0].data_ptr()
        assert into[128:].eq(255).all()


@pytest.mark.gpu
def test_what_arrived_does_not_follow_the_host() -> None:
    array = np.arange(4)
    (tensor,) = upload_together([array], DEVICE)
    array[:] = -1
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_uploads_behind_a_busy_device_keep_their_values() -> None:
    torch.cuda._sleep(200_000_000)
    tensors = [upload(np.full(1000, number), DEVICE) for number in range(300)]
    assert [int(tensor[999]) for tensor in tensors] == list(range(300))
