"""Map the tensors of a checkpoint to the weights of one layer of the model, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.layers.linear_method import Unquantized, Weighted
from asyncllm.lite.smoothing import AnyNorm, Masters, Matrix
from asyncllm.lite.walk import Walk
from asyncllm.models.stream import FLOAT_DTYPES
from asyncllm.models.weights import LoadPlan

__all__ = ["Stored", "restored", "stored_weights"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight or bias of the checkpoint, which corresponds to some rows of a matrix of the model."""

    name: str
    matrix: Matrix
    rows: Tensor
    """int64 [N]: the rows, in the checkpoint's order."""
    suffix: str
    transposed: bool

    @property
    def module(self) -> str:
        """The module's name in the checkpoint."""
        return self.name.removesuffix(f".{self.suffix}")


class _Rows(Unquantized):
    """Records where each row goes rather than loading it."""

    def __init__(self) -> None:
        self.expert: int | None = None
        self.places: list[tuple[Tensor, slice]] = []

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.expert = index
        self.places.append((tensor.reshape(-1).clone(), layer.rows[part]))


def stored_weights(walk: Walk, layer: int) -> Iterator[Stored]:
    """Yield the weights and biases among the checkpoint's tensors of a filled layer."""
    plan = walk.plan
    for name in walk.names(layer):
        target, owner = plan.targets[name], plan.owner(name)
        if not isinstance(owner, Weighted):
            continue
        recorder, method = _Rows(), owner.method
        owner.method = recorder
        suffix = target.keys[0][0]
        numbers = torch.arange(walk.checkpoint.tensors[name].shape[-1 if target.transposed else 0])
        # Treated as a weight with one input feature, which the plan splits and the layer sorts like any other.
        shaped = numbers if suffix != "weight" else numbers[None] if target.transposed else numbers[:, None]
        plan.copy(name, shaped)
        owner.method = method
        rows = torch.empty_like(numbers)
        for places, taken in recorder.places:
            rows[places] = torch.arange(taken.start, taken.stop)
        yield Stored(name, Matrix(owner, recorder.expert), rows, suffix, target.transposed)


def restored(plan: LoadPlan, name: str, stored: Stored | None, masters: Masters, dtype: str) -> Tensor | None:
    """Return tensor `name` in the checkpoint's form with the changes made to its module, or None if there are none."""
    owner = plan.owner(name)
    if id(owner) not in masters.changed:
        return None
    if isinstance(owner, AnyNorm):
        suffix = plan.targets[name].keys[0][0]
        values = owner.get_parameter(suffix).detach().float()
        values = values - owner.stored_less if suffix == "weight" else values
    else:
        assert stored is not None
        held = masters.weight(stored.matrix) if stored.suffix == "weight" else masters.bias(stored.matrix)
        assert held is not None
        values = held[stored.rows]
        values = values.t() if stored.transposed else values
    return values.to(FLOAT_DTYPES[dtype]).cpu().contiguous()
