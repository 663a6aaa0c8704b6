"""Map the tensors of a checkpoint to the weights of one layer of the model, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.layers.linear_method import Unquantized, Weighted
from asyncllm.lite.smoothing import AnyNorm, Masters, Matrix
from asyncllm.lite.walk import Walk
from asyncllm.models.expert_rows import name_of_experts
from asyncllm.models.loading.load_plan import LoadPlan
from asyncllm.models.loading.stream import FLOAT_DTYPES

__all__ = ["StoredWeight", "module_of_expert", "restored", "stored_weights"]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight or bias of the new checkpoint, which corresponds to some rows of a matrix of the model."""

    name: str
    """Name of the tensor in an unquantized file. Experts that the old checkpoint stacks have a tensor each."""
    matrix: Matrix
    rows: Tensor
    """int64 [N]: the rows, in the checkpoint's order."""
    suffix: str
    transposed: bool

    @property
    def module(self) -> str:
        """The module's name in the checkpoint."""
        return self.name.removesuffix(f".{self.suffix}")


class _RowRecorder(Unquantized):
    """Records where each row goes rather than loading it."""

    def __init__(self) -> None:
        self.expert: int | None = None
        self.places: list[tuple[Tensor, slice]] = []

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.expert = index
        self.places.append((tensor.reshape(-1).clone(), layer.rows[part]))


def stored_weights(walk: Walk, name: str) -> Sequence[StoredWeight]:
    """Return the weights or biases that tensor `name` of the old checkpoint holds, whose layer is filled; none for a
    tensor of another kind."""
    target, owner = walk.plan.targets[name], walk.plan.owner(name)
    if not isinstance(owner, Weighted):
        return ()
    return _of_stack(walk, name, owner) if target.stack is not None else (_of_tensor(walk, name, owner),)


def module_of_expert(walk: Walk, name: str, part: str | None) -> str | None:
    """Return the name of the modules that hold a part of one expert each, with {e} for the expert, in the place of
    tensor `name`, which holds all of them; None if there is none."""
    return name_of_experts(walk.model.weight_map.rows, walk.plan.targets[name].module, part, like=name)


def _of_stack(walk: Walk, name: str, owner: Weighted) -> Sequence[StoredWeight]:
    target = walk.plan.targets[name]
    parts = {part: module_of_expert(walk, name, part) for _, part, _ in target.keys}
    found = []
    for suffix, part, expert in target.keys:
        module, rows = parts[part], owner.rows[part]
        assert module is not None, "`quantize` refuses the checkpoint"
        new, own = f"{module.format(e=expert)}.{suffix}", torch.arange(rows.start, rows.stop)
        found.append(StoredWeight(new, Matrix(owner, expert), own, suffix, transposed=False))
    return found


def _of_tensor(walk: Walk, name: str, owner: Weighted) -> StoredWeight:
    plan, target = walk.plan, walk.plan.targets[name]
    recorder, method = _RowRecorder(), owner.method
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
    return StoredWeight(name, Matrix(owner, recorder.expert), rows, suffix, target.transposed)


def restored(
    plan: LoadPlan, name: str, weights: Sequence[StoredWeight], masters: Masters, dtype: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensor `name`, which is not rounded, in the new checkpoint's form with the changes made to its module;
    nothing if it stays as it is. `weights`: those it holds."""
    owner, target = plan.owner(name), plan.targets[name]
    if id(owner) not in masters.changed and target.stack is None:
        return
    stored_type = FLOAT_DTYPES[dtype]
    if isinstance(owner, AnyNorm):
        suffix = target.keys[0][0]
        values = owner.get_parameter(suffix).detach().float()
        values = values - owner.stored_less if suffix == "weight" else values
        yield name, values.to(stored_type).cpu()
    for each in weights:
        master = masters.weight(each.matrix) if each.suffix == "weight" else masters.bias(each.matrix)
        assert master is not None
        values = master[each.rows]
        values = values.t() if each.transposed else values
        yield each.name, values.to(stored_type).cpu().contiguous()
