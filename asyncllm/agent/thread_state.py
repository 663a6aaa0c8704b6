"""What a program has switched on in its thread does not reach the steps that are launched there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["own_thread_state"]


@contextmanager
def own_thread_state(device_type: str) -> Iterator[None]:
    """Inference mode, without autocast or a default device.

    A coroutine may wait for its answer inside `with torch.autocast(...)` or `with torch.device(...)`, which then hold
    for all that runs in the event loop's thread meanwhile. This takes 5 us.
    """
    with (
        torch.inference_mode(),
        torch._C.DisableTorchFunction(),
        torch.autocast(device_type, enabled=False),
    ):
        yield
