"""Loading: which tensor of a checkpoint fills which part of a model, checked by the headers before any data is read."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from asyncllm.errors import InvalidCheckpoint, InvalidParameter, UnsupportedModel, short
from asyncllm.layers.layer import PartKey
from asyncllm.layers.linear_method import FLOATS, Stored, Weighted
from asyncllm.models.fused import LAYOUTS, STACKS
from asyncllm.models.loading.checkpoint import Checkpoint, TensorEntry
from asyncllm.models.loading.shard_file import DTYPE_NAMES
from asyncllm.models.loading.stream import stream
from asyncllm.models.weights import Target, WeightMap

__all__ = [
    "LoadPlan",
    "WeightOwner",
    "expected_numbers",
    "load",
    "plan_load",
    "plan_update",
    "stream_to",
]

logger = logging.getLogger("asyncllm")

_IN_MEMORY = "update_weights"
"""The source of tensors that do not come from a file."""

_MIN_RUN_BYTES = 4096
"""Minimum bytes per row of a rank's columns for which a separate read pays off; a read takes some 2 us."""

_MAX_REFUSED = 5
"""Maximum number of tensors listed in an error message."""


@runtime_checkable
class WeightOwner(Protocol):
    """The interface of modules that own parameters to the loader.

    Modules may also have `stored(suffix)`, like `layers.linear_method.Weighted`. It returns the dtypes and the axis of
    output features of a suffix's tensors; the default is floats with output features first.
    """

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        """Return every part that must be filled, with its shape in the checkpoint (whole, before any sharding)."""

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        """Copy a tensor of the declared shape into the parameter, converting to its dtype and device.

        `tensor` is already on the parameter's device, or is a read-only view of a file. Its memory is invalid
        afterwards.
        """


class _Offer(NamedTuple):
    """A tensor offered to the model, before any of it is read."""

    name: str
    dtype: str
    """Name in the safetensors format."""
    shape: tuple[int, ...]
    source: str
    """The tensor's origin, for error messages."""


class LoadPlan:
    """The assignment of tensors to the parts of a model, built from one offer after the other."""

    def __init__(self, model: nn.Module, table: WeightMap) -> None:
        self._owners = _owners(model)
        self._table = table
        self.expected: dict[tuple[str, PartKey], tuple[int, ...]] = {
            (path, key): shape for path, owner in self._owners.items() for key, shape in owner.expected_parts().items()
        }
        self._filled: dict[tuple[str, PartKey], str] = {}
        self.targets: dict[str, Target] = {}
        """Targets of the needed tensors, by name."""

    def add(self, offer: _Offer) -> None:
        """Find the target of a tensor. Raises InvalidCheckpoint, UnsupportedModel."""
        target = _resolve(self._table, offer)
        if target is None:
            return
        owner = self._owners.get(target.module)
        if target.stack is not None:
            # A layer without experts has no part of the first one, which the checks name.
            experts = (owner.stored_experts if isinstance(owner, Weighted) else None) or 1
            target = self._one_layout(target.of_experts(experts), experts, offer.shape)
        _check(offer, target, self.expected, self.stored(target), self._blocks(target))
        self._check_pieces(offer, target)
        for key in target.keys:
            other = self._filled.setdefault((target.module, key), offer.name)
            if other != offer.name:
                raise InvalidCheckpoint(
                    f"{offer.source}: tensors {short(other)} and {short(offer.name)} both fill "
                    f"{_describe(target.module, key)}. Remove one of them from the checkpoint."
                )
        self.targets[offer.name] = target

    def _check_pieces(self, offer: _Offer, target: Target) -> None:
        """Refuse a tensor with pieces of several parts in turn, if an entry has features of two pieces."""
        layout, stored = LAYOUTS.get(target.layout or ""), self.stored(target)
        if layout is None or stored.axis is None or stored.features > 1:
            return
        pieces = layout.pieces(self._owners[target.module])
        sizes = [self.expected[target.module, key][stored.axis] for key in target.keys]
        if any(size % pieces for size in sizes):
            raise UnsupportedModel(
                f"{offer.source}: tensor {short(offer.name)} has {pieces} pieces of each of its parts in turn, and "
                f"{pieces} does not divide the {' and '.join(map(str, sizes))} entries in which "
                f"{' and '.join(map(str, self._features(target)))} output features of the parts are stored. Use the "
                f"weights in bfloat16, float16 or float32, or leave this layer out when you quantize them."
            )

    def _one_layout(self, target: Target, experts: int, shape: Sequence[int]) -> Target:
        """Return a target with one layout, chosen by the tensor's shape where the table allows two."""
        parts = [self.expected.get((target.module, key), ()) for key in target.keys if key[2] == 0]
        if target.layout != "stacked_either" or not all(parts):
            return target
        stacked = STACKS["stacked"].shape(experts, sum(part[0] for part in parts), parts[0][1:])
        return Target(target.module, target.keys, "stacked") if tuple(shape) == stacked else target

    def owner(self, name: str) -> WeightOwner:
        """Return the module that tensor `name` is for."""
        return self._owners[self.targets[name].module]

    def stored(self, target: Target) -> Stored:
        """Return how the tensors of a target are stored."""
        owner = self._owners.get(target.module)
        return owner.stored(target.keys[0][0]) if isinstance(owner, Weighted) else FLOATS

    def _features(self, target: Target) -> Sequence[int]:
        """Return the output features of each part of a target."""
        owner = self._owners.get(target.module)
        whole = owner.whole_shapes if isinstance(owner, Weighted) else {}
        return [whole[part][0] for _, part, _ in target.keys if part in whole]

    def _blocks(self, target: Target) -> int:
        """Return the number of blocks of output features of a target whose layout has blocks, or 0."""
        layout, stored, features = LAYOUTS.get(target.layout or ""), self.stored(target), self._features(target)
        if layout is None or stored.features == 1 or not features:
            return 0
        return layout.blocks(sum(features), stored.features, self._owners[target.module])

    def quantized(self, name: str) -> str | None:
        """Return the path of the layer of tensor `name`, if its parts cannot be replaced one by one."""
        target = self._table.resolve(name)
        owner = None if target is None else self._owners.get(target.module)
        return target.module if target and isinstance(owner, Weighted) and not owner.method.replaceable else None

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise InvalidCheckpoint for numbers that `copy` would refuse."""
        target = self.targets.get(name)
        owner = None if target is None else self._owners[target.module]
        if target is not None and isinstance(owner, Weighted):
            try:
                owner.method.check(target.keys[0][0], tensor)
            except InvalidCheckpoint as error:
                raise InvalidCheckpoint(f"{short(name)}: {error}") from None

    def incomplete(self) -> list[str]:
        """Return the missing tensors of parts that need several tensors and have received only some."""
        begun = {(path, part, index) for path, (_, part, index) in self._filled}
        return [
            _describe(path, key)
            for path, key in self.expected
            if (path, key) not in self._filled
            and (path, *key[1:]) in begun
            and isinstance(owner := self._owners[path], Weighted)
            and owner.method.replaced_together
        ]

    def missing(self) -> str | None:
        """Return which parts no tensor fills, as the middle of a sentence; None if all are filled."""
        missing = [_describe(path, key) for path, key in self.expected if (path, key) not in self._filled]
        if not missing:
            return None
        return (
            f"no tensor fills {len(missing)} of the model's {len(self.expected)} parameters: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        )

    def part_to_read(self, entry: TensorEntry) -> TensorEntry:
        """Return the part of a tensor to read: this rank's share, if ranks divide it. Return all of it if one tensor
        holds several parts of a layer, or if the rank's columns are too short for a separate read per row."""
        target = self.targets[entry.name]
        owner = self._owners[target.module]
        if not isinstance(owner, Weighted) or target.layout is not None or len(target.keys) > 1:
            return entry
        own = owner.own_part(*target.keys[0])
        if own is None:
            return entry
        some = entry.part(*own)
        return entry if some.stride and some.num_bytes < _MIN_RUN_BYTES * some.shape[0] else some

    def copy_own(self, name: str, tensor: Tensor) -> None:
        """Copy the part of a tensor that `part_to_read` returns to its target."""
        owner = self.owner(name)
        assert isinstance(owner, Weighted), "other layers are read whole"
        owner.load_own(*self.targets[name].keys[0], tensor)

    def copy(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to its target. The tensor is invalid afterwards."""
        target = self.targets[name]
        owner = self._owners[target.module]
        if target.transposed:
            tensor = tensor.t()
        pieces = [tensor]
        stored = self.stored(target)
        axis = stored.axis
        if target.stack is not None:
            shapes = [self.expected[target.module, key] for key in target.keys if key[2] == 0]
            pieces = target.stack.split(tensor, len(target.keys) // len(shapes), [shape[0] for shape in shapes])
        elif target.layout is not None and axis is None:
            pieces = [tensor] * len(target.keys)
        elif target.layout is not None and axis is not None:
            sizes = [self.expected[target.module, key][axis] for key in target.keys]
            if stored.features > 1:
                sizes = list(self._features(target))
                tensor = LAYOUTS[target.layout].spread(tensor, sum(sizes), stored.features, owner)
            split = LAYOUTS[target.layout].split(tensor.movedim(axis, 0), sizes, owner)
            pieces = [piece.movedim(0, axis) for piece in split]
        for (suffix, part, index), piece in zip(target.keys, pieces, strict=True):
            try:
                owner.load_part(suffix, part, index, piece)
            except InvalidCheckpoint as error:
                raise InvalidCheckpoint(f"{short(name)}: {error}") from None


def expected_numbers(model: nn.Module) -> int:
    """Return how many numbers a checkpoint of `model` holds."""
    return sum(math.prod(shape) for owner in _owners(model).values() for shape in owner.expected_parts().values())


def plan_load(model: nn.Module, checkpoint: Checkpoint, table: WeightMap) -> LoadPlan:
    """Return which tensor of `checkpoint` fills which part of `model`, which may be on the meta device.

    Everything is checked against the headers, and no data is read. Raises like `load`.
    """
    plan = LoadPlan(model, table)
    for entry in checkpoint.tensors.values():
        plan.add(_Offer(entry.name, entry.dtype, entry.shape, str(entry.file)))
    for module, count in Counter(map(table.skipped_module, checkpoint.tensors)).items():
        if module is not None:
            logger.info("%s: %d tensors of %s are not needed and left out", checkpoint.folder, count, module)
    missing = plan.missing()
    if missing is not None:
        raise InvalidCheckpoint(
            f"{checkpoint.folder}: {missing}. Check that config.json belongs to these weights and that no shard is "
            f"missing."
        )
    return plan


@torch.no_grad()
def load(model: nn.Module, checkpoint: Checkpoint, table: WeightMap) -> None:
    """Fill every parameter of `model` from `checkpoint`.

    Everything is checked against the headers before the first byte of data is read: either the whole model is filled,
    or the call raises. Values are converted to each parameter's dtype and device.

    Raises:
        InvalidCheckpoint: a tensor has no row or parameter, fills a part twice or has the wrong shape, or no tensor
            fills some part.
        UnsupportedModel: a tensor's dtype does not fit its target, such as integers instead of floats.
        TypeError: a module of `model` owns parameters and is not a WeightOwner.
        ValueError: a parameter of `model` is on the meta device, where nothing can be filled.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device; call to_empty() before load()")
    plan = plan_load(model, checkpoint, table)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        # The file's pages are the source of the only copy, so nothing has to be staged.
        with closing(checkpoint.read(plan.targets)) as tensors:
            for name, tensor in tensors:
                plan.copy(name, tensor)
    else:
        stream_to(plan, checkpoint, device)


def stream_to(plan: LoadPlan, checkpoint: Checkpoint, device: torch.device, **settings: int) -> None:
    """Read the tensors of a plan to `device`, and copy each to its target. `settings`: of `stream`."""

    def take(entry: TensorEntry, tensor: Tensor) -> None:
        whole = entry.shape == checkpoint.tensors[entry.name].shape
        (plan.copy if whole else plan.copy_own)(entry.name, tensor)

    stored = [plan.part_to_read(checkpoint.tensors[name]) for name in plan.targets if name not in checkpoint.expanded]
    stream(stored, device, take, **settings)
    for name, tensor in checkpoint.expand(plan.targets, device):
        plan.copy(name, tensor)


def plan_update(
    model: nn.Module, tensors: Mapping[str, Tensor], table: WeightMap, *, whole: bool = False
) -> Callable[[], None]:
    """Check tensors that will replace parameters of `model`, by their names in a checkpoint: some of them, or with
    `whole` all. Return a function that copies them in place, to each parameter's dtype and device, wherever the tensors
    are.

    This call copies nothing, and once it has accepted all tensors, none can be refused later. The parameters may be on
    the meta device if they are only checked. Raises InvalidParameter, which names the tensors that do not fit.
    """
    plan = LoadPlan(model, table)
    refused: list[str] = []
    for name, tensor in tensors.items():
        try:
            layer = plan.quantized(name)
            if layer is not None:
                raise InvalidCheckpoint(
                    f"{_IN_MEMORY}: {short(name)} is for {layer}, whose weight is quantized and is only loaded whole. "
                    f"Update the other layers, or open the new checkpoint."
                )
            plan.add(_offer(name, tensor))
            plan.check(name, tensor)
        except (InvalidCheckpoint, UnsupportedModel) as error:
            refused.append(str(error))
    if refused:
        raise InvalidParameter(
            f"{len(refused)} of {len(tensors)} tensors do not fit, so no weight was changed. "
            f"{' '.join(refused[:_MAX_REFUSED])}{' ...' if len(refused) > _MAX_REFUSED else ''} Names and shapes have "
            f"to be those of the checkpoint's files, to which transformers' revert_weight_conversion brings a "
            f"state_dict() back.",
            "weights",
        )
    _check_tied(plan, tensors, table)
    incomplete = plan.incomplete()
    if incomplete:
        raise InvalidParameter(
            f"No weight was changed: {', '.join(incomplete[:5])}{', ...' if len(incomplete) > 5 else ''} is missing, "
            f"and the tensors of a quantized weight make sense only together. Pass all of them.",
            "weights",
        )
    missing = plan.missing() if whole else None
    if missing is not None:
        raise InvalidParameter(
            f"The model's weights were discarded, and {missing}. Pass all of them, or wake the model first, which "
            f"reads its checkpoint again.",
            "weights",
        )

    @torch.no_grad()
    def copy() -> None:
        for name in plan.targets:
            plan.copy(name, tensors[name].detach())

    return copy


def _check_tied(plan: LoadPlan, tensors: Mapping[str, Tensor], table: WeightMap) -> None:
    """Raise InvalidParameter for a head that would be ignored although it is not a copy of the embedding, in a model
    that ties the two."""
    embeddings = [tensors[name] for name, target in plan.targets.items() if target.module == "embed"]
    for name in set(table.ignored).intersection(tensors):
        for embedding in embeddings:
            head = tensors[name].to(embedding.device)
            if head.shape != embedding.shape or not torch.equal(head.float(), embedding.float()):
                raise InvalidParameter(
                    f"No weight was changed: {short(name)} differs from the token embedding, and the loaded model has "
                    f"one tensor for both. Load a checkpoint whose head is its own.",
                    "weights",
                )


def _offer(name: str, tensor: Any) -> _Offer:
    """Return an offer of a tensor in memory. Raises InvalidCheckpoint if it is not a plain tensor."""
    # A subclass may stand for a part of a tensor, and fail in the middle of the copies.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise InvalidCheckpoint(
            f"{_IN_MEMORY}: {short(name)} is not a dense torch.Tensor with data, but {type(tensor).__name__}. Gather "
            f"the whole of it first."
        )
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return _Offer(name, dtype, tuple(tensor.shape), _IN_MEMORY)


def _owners(model: nn.Module) -> dict[str, WeightOwner]:
    owners: dict[str, WeightOwner] = {}
    for path, module in model.named_modules():
        if isinstance(module, WeightOwner):
            owners[path] = module
        elif next(module.parameters(recurse=False), None) is not None:
            raise TypeError(f"{path or 'the model'} owns parameters and lacks expected_parts() and load_part()")
    return owners


def _resolve(table: WeightMap, offer: _Offer) -> Target | None:
    try:
        return table.resolve(offer.name)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{offer.source}: {error}") from None


def _check(
    offer: _Offer,
    target: Target,
    expected: Mapping[tuple[str, PartKey], tuple[int, ...]],
    stored: Stored,
    blocks: int,
) -> None:
    """Refuse a tensor with the wrong dtype, target or shape. `blocks`: number of blocks of output features of all parts
    together."""
    shapes = [expected.get((target.module, key)) for key in target.keys]
    if offer.dtype not in (FLOATS if None in shapes else stored).dtypes:
        raise UnsupportedModel(
            f"{offer.source}: tensor {short(offer.name)} is {offer.dtype}, which is not what config.json asks for. Use "
            f"the config.json of the same checkpoint, whose quantization_config says how its weights are quantized, or "
            f"the weights in bfloat16, float16 or float32."
        )
    for key, shape in zip(target.keys, shapes, strict=True):
        if shape is None:
            raise InvalidCheckpoint(
                f"{offer.source}: tensor {short(offer.name)} has no place in the model, which config.json builds "
                f"without {_describe(target.module, key)}. Check that config.json belongs to these weights."
            )
    known = [shape for shape in shapes if shape is not None]
    part_to_read = list(known[0])
    if stored.axis is not None and part_to_read:
        part_to_read[stored.axis] = sum(shape[stored.axis] for shape in known)
        if stored.features > 1 and target.layout is not None:
            part_to_read[stored.axis] = blocks
    if target.transposed:
        part_to_read.reverse()
    if target.stack is not None:
        parts = [shape for shape, key in zip(known, target.keys, strict=True) if key[2] == 0]
        outputs = sum(shape[0] for shape in parts)
        part_to_read = list(target.stack.shape(len(known) // len(parts), outputs, parts[0][1:]))
    if list(offer.shape) != part_to_read:
        raise InvalidCheckpoint(
            f"{offer.source}: tensor {short(offer.name)} has shape {short(list(offer.shape))}, and config.json asks "
            f"for {part_to_read}. Check that config.json belongs to these weights."
        )


def _describe(path: str, key: PartKey) -> str:
    suffix, part, index = key
    inner = ",".join(str(item) for item in (part, index) if item is not None)
    return f"{path}.{suffix}[{inner}]" if inner else f"{path}.{suffix}"
