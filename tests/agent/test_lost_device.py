"""What a lost device may still write is never freed: torch would end the process for it."""

from __future__ import annotations

import gc
import weakref
from typing import cast

import pytest
import torch

from asyncllm.agent.model_agent import ModelAgent
from asyncllm.agent.pending_step import abandon
from asyncllm.protocol import Batch
from tests.agent.tiny_model import tiny_agent


class Owner:
    """Has something, and itself."""

    def __init__(self, owned: object = None) -> None:
        self.owned, self.itself = owned, self


def small_agent() -> ModelAgent:
    return tiny_agent(num_gpu_blocks=8, max_batch_size=2)


class LostEvent:
    def synchronize(self) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("abandoned", [True, False])
def test_what_is_abandoned_stays_with_all_that_it_has(abandoned: bool) -> None:
    owned = Owner()
    owner, kept = Owner(owned), weakref.ref(owned)
    if abandoned:
        abandon(owner)
    del owner, owned
    gc.collect()
    assert (kept() is not None) == abandoned


@pytest.mark.parametrize(
    ("error", "survives", "lost"),
    [
        (torch.AcceleratorError("CUDA error"), False, True),
        (RuntimeError("shapes do not fit"), True, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_an_agent_stays_when_its_device_is_lost(error: BaseException, survives: bool, lost: bool) -> None:
    agent = small_agent()
    assert agent.survives(error) == survives
    kept = weakref.ref(agent)
    del agent
    gc.collect()
    assert (kept() is not None) == lost


def test_steps_in_flight_stay_when_one_of_them_finds_that_the_device_is_lost() -> None:
    agent = small_agent()
    nothing = Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=[])
    launched = [agent.launch(nothing) for _ in range(3)]
    kept = [weakref.ref(pending) for pending in launched]
    launched[0]._arrival = cast(torch.cuda.Event, LostEvent())
    with pytest.raises(torch.AcceleratorError):
        launched[0].wait()
    del agent, launched
    gc.collect()
    assert all(pending() is not None for pending in kept)
