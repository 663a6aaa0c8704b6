"""LoRA adapters of a linear layer: each token's own, selected by the device slot of its sequence's adapter."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LoRAWeights
from asyncllm.layers.step_inputs import Column, StepInputs

__all__ = ["ADAPTER_SLOTS", "LayerAdapters"]

ADAPTER_SLOTS = Column(
    name="adapter_slots",
    dtype=torch.int32,
    per="token",
    padding=-1,
    of_slot=lambda start: start.adapter_slot,
)
"""-1 for a token without an adapter."""


class LayerAdapters:
    """The slots of one layer, as views of the memory that `agent.adapters` writes: RowAdapters of a `Linear`."""

    columns = (ADAPTER_SLOTS,)

    def __init__(self, weights: LoRAWeights) -> None:
        self.weights = weights

    def add(self, y: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        return kernels.add_lora(
            y,
            x,
            step[ADAPTER_SLOTS],
            self.weights,
            num_single=step.num_decode,
            batch_invariant=step.batch_invariant,
        )
