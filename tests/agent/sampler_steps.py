"""How an agent drives a Sampler in a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.protocol import TokenLogprobs

__all__ = ["Steps", "never_waiting"]


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, whatever waits for the device inside raises; afterwards all has run."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


class Steps:
    """Runs a Sampler as an agent does, with as many rows without a slot at the end as are asked for."""

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 12) -> None:
        self.sampler = Sampler(num_slots, vocab_size, device)
        self.device = device

    def launch(
        self, logits: Tensor, slots: list[int], positions: list[int], fill: int = 0
    ) -> tuple[Tensor, Tensor, Any]:
        rows = len(slots) + fill
        host_slots = np.array(slots + [-1] * fill, np.int64)
        host_positions = np.array(positions + [0] * fill, np.int64)
        device_slots = torch.from_numpy(host_slots.astype(np.int32)).to(self.device)
        device_positions = torch.from_numpy(host_positions).to(self.device)
        padded = torch.cat([logits, torch.full((fill, logits.shape[1]), torch.nan)]).to(self.device)
        tokens = torch.full((rows,), -7, device=self.device)
        flags = torch.full((rows,), -7, dtype=torch.int32, device=self.device)
        with never_waiting(self.device):
            self.sampler.upload()
            self.sampler.draw(padded, device_slots, device_positions, tokens, flags)
            self.sampler.edit_and_redraw(
                padded, host_slots, host_positions, device_slots, device_positions, tokens, flags
            )
            pending = self.sampler.logprobs(padded, host_slots, tokens)
        assert tokens[len(slots) :].tolist() == flags[len(slots) :].tolist() == [0] * fill
        return tokens, flags, pending

    def finish(
        self, slots: list[int], tokens: Tensor, flags: Tensor, pending: Any
    ) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        host_slots = np.array(slots, np.int64)
        drawn = tokens[: len(slots)].numpy(force=True)
        errors = self.sampler.errors(host_slots, flags[: len(slots)].numpy(force=True))
        self.sampler.observe(slots, drawn.tolist())
        return drawn.tolist(), {} if pending is None else pending.result(errors), errors
