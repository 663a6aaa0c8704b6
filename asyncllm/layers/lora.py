"""LoRA adapters of a linear layer: each token's own, selected by the device slot of its sequence's adapter."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LoRAWeights
from asyncllm.layers.step_inputs import Column, StepInputs

__all__ = ["ADAPTER_SLOTS", "LayerAdapters", "group_adapters"]

ADAPTER_SLOTS = Column(
    name="adapter_slots",
    dtype=torch.int32,
    per="token",
    padding=-1,
    of_slot=lambda start: start.adapter_slot,
)
"""-1 for a token without an adapter."""


_FEW = 64
"""Maximum number of tokens that are all grouped, those of prompts too: larger tiles would be nearly empty."""


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
            groups=step.adapter_groups,
            batch_invariant=step.batch_invariant,
        )


def group_adapters(step: StepInputs) -> None:
    """Group the rows of a step with adapters by these, once for all layers, before the first one's kernels."""
    if step.adapted and not step.batch_invariant:
        slots = step[ADAPTER_SLOTS]
        step.adapter_groups = kernels.group_rows(slots if len(slots) <= _FEW else slots[: step.num_decode])
