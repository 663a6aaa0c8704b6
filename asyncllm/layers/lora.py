"""LoRA adapters of a linear layer. A token's adapter is selected by its slot on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LoRAWeights, ShrunkRows
from asyncllm.kernels.lora import FEW_ROWS
from asyncllm.layers.linear_method import Activation, Weighted
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


class LayerAdapters:
    """The slots of one layer, as views of the memory that `agent.adapters` writes: RowAdapters of a `Linear`."""

    columns = (ADAPTER_SLOTS,)

    def __init__(self, weights: LoRAWeights) -> None:
        self.weights = weights

    def product(self, layer: Weighted, x: Tensor, step: StepInputs) -> tuple[Tensor, ShrunkRows]:
        slots, groups = step[ADAPTER_SLOTS], step.adapter_groups
        return layer.method.product_and_shrunk(layer, x, slots, self.weights, step.num_decode, groups)

    def expand(self, y: Tensor, shrunk: ShrunkRows, step: StepInputs) -> Tensor:
        return kernels.expand_lora(y, shrunk, step[ADAPTER_SLOTS], self.weights, groups=step.adapter_groups)

    def expand_gated(self, y: Tensor, shrunk: ShrunkRows, activation: Activation, step: StepInputs) -> Tensor:
        slots, groups = step[ADAPTER_SLOTS], step.adapter_groups
        gelu = activation == "gelu_tanh"
        return kernels.expand_lora_gated(y, shrunk, slots, self.weights, groups=groups, gelu=gelu)


def group_adapters(step: StepInputs) -> None:
    """Group the decode rows of a step by adapter, if they are many. The model calls this once for all layers."""
    # A batch-invariant step groups all tokens, because no result may depend on how many there are.
    count = len(step.input_ids) if step.batch_invariant else step.num_decode
    if step.batch_invariant or count > FEW_ROWS:
        step.adapter_groups = kernels.group_rows(step[ADAPTER_SLOTS][:count])
