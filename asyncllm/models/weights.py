"""Weight tables: how the names of checkpoint tensors map to our modules, and loading by such a table.

A row maps a checkpoint *module* to one of ours: "model.layers.{i}.self_attn.q_proj" -> "layers.{i}.attn.qkv[q]". The
rest of a tensor's name after the module ("weight", "bias", later "qweight" or "lora_A.weight") is the suffix, which
belongs to the receiving module. Brackets name the part of a fused parameter:

    layers.{i}.attn.qkv[q]                   part q
    layers.{i}.mlp.experts.gate_up[up,{e}]   part up of expert e
    layers.{i}.mlp.experts.down[{e}]         expert e
        layers.{i}.attn.qkv[q+k+v]               one tensor holds q, k and v, concatenated along axis 0
        layers.{i}.attn.qkv[q+k+v:grouped]       one tensor holds, per KV head, its query heads, then k, then v
        layers.{i}.attn.qkv[q+gate:by_head]      one tensor holds, per head, its part of q, then of the gate
        layers.{i}.attn.qkv[q+k+v:transposed]    q, k and v, concatenated along axis 1: a weight is [in, out]
        layers.{i}.mlp.down[:transposed]         a single weight [in, out]
        layers.{i}.attn.qkv[q+k+v:quarters]      one tensor holds, four times, a quarter of q, of v and of k
        layers.{i}.mlp.gate_up[gate+up:stacked]  one tensor [experts, out, in] holds all experts, with gate and up of
        each;
                                                 `fused.STACKS` has other orders

A tensor that is not named by its module and a suffix has a row of its own, whose target ends in the suffix:
"model.layers.{i}.mlp.gate.e_score_correction_bias" -> "layers.{i}.mlp.correction:bias".
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from asyncllm.errors import InvalidCheckpoint, InvalidParameter, UnsupportedModel, short
from asyncllm.layers.layer import PartKey
from asyncllm.layers.linear_method import FLOATS, Stored, Weighted
from asyncllm.models.checkpoint import Checkpoint, TensorEntry
from asyncllm.models.derived_tensors import is_derived
from asyncllm.models.fused import LAYOUTS, STACKS, Stack
from asyncllm.models.name_tree import PLACEHOLDER, tree_of, walk
from asyncllm.models.stream import DTYPES, stream

__all__ = [
    "LoadPlan",
    "PartKey",
    "Target",
    "WeightMap",
    "WeightOwner",
    "expected_numbers",
    "load",
    "plan_load",
    "plan_update",
    "stream_to",
]

logger = logging.getLogger("asyncllm")

_FORMAT_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_IN_MEMORY = "update_weights"
"""The source of tensors that do not come from a file."""

_LEAST_RUN = 4096
"""Minimum bytes per row of a rank's columns for which a separate read pays off; a read takes some 2 us."""

_MAX_REFUSED = 5
"""Maximum number of tensors listed in an error message."""

_TARGET = re.compile(
    r"(?P<module>[^\[\]:]+)(?::(?P<suffix>\w+))?"
    r"(?:\[(?:(?P<parts>\w+(?:\+\w+)*)(?::(?P<layout>\w+))?(?:,\{(?P<index>\w+)\})?"
    r"|\{(?P<alone>\w+)\}|:(?P<whole>\w+))\])?"
)


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


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: it fills the parts `keys` of module `module`, in order along the output
    features."""

    module: str
    keys: tuple[PartKey, ...]
    layout: str | None = None

    @property
    def stack(self) -> Stack | None:
        """The order of stacked experts, if the tensor holds all of them."""
        return STACKS.get(self.layout or "")

    def of_experts(self, count: int) -> Target:
        """Return the target with its parts for each of `count` experts."""
        keys = tuple((suffix, part, expert) for expert in range(count) for suffix, part, _ in self.keys)
        return Target(self.module, keys, self.layout)

    @property
    def transposed(self) -> bool:
        """Whether the tensor is a matrix [in, out]. Quantized tensors in its place are not transposed."""
        return self.layout == "transposed" and self.keys[0][0] == "weight"


@dataclass(frozen=True, slots=True)
class _Row:
    """A parsed row: `module` still has its placeholders; `index` names the placeholder that is the part's index;
    `suffix` is set for a row of a single tensor."""

    module: str
    suffix: str | None
    parts: tuple[str | None, ...]
    layout: str | None
    index: str | None

    @staticmethod
    def parse(pattern: str, target: str) -> _Row:
        match = _TARGET.fullmatch(target)
        if match is None:
            raise ValueError(f"weight table: {target!r} is not of the form module[part,{{index}}]")
        unbound = set(PLACEHOLDER.findall(target)) - set(PLACEHOLDER.findall(pattern))
        if unbound:
            raise ValueError(f"weight table: {target!r} uses {sorted(unbound)}, which {pattern!r} does not bind")
        parts, layout, index = match["parts"], match["layout"] or match["whole"], match["index"] or match["alone"]
        if layout is not None and layout not in LAYOUTS and layout not in STACKS:
            raise ValueError(f"weight table: {target!r} asks for the unknown layout {layout!r}")
        names: tuple[str | None, ...] = (None,) if parts is None else tuple(parts.split("+"))
        return _Row(match["module"], match["suffix"], names, layout or ("flat" if len(names) > 1 else None), index)


class WeightMap:
    """The weight table of a family. Immutable.

    `rows` maps patterns of checkpoint module names to targets in our model. `ignored` are patterns of tensor names that
    the model does not need, `aside` patterns of modules to skip entirely; both take precedence over rows. A placeholder
    such as {i} stands for one decimal number.

    Raises ValueError for a malformed table, which is a mistake in a family file.
    """

    __slots__ = ("_aside", "_ignored", "_modules", "_names", "_rows", "_tree")

    def __init__(self, rows: Mapping[str, str], *, ignored: Iterable[str] = (), aside: Iterable[str] = ()) -> None:
        self._rows = MappingProxyType(dict(rows))
        self._ignored = tuple(dict.fromkeys(ignored))
        self._aside = tuple(dict.fromkeys(aside))
        self._modules = tree_of((pattern, True) for pattern in self._aside)
        self._tree = tree_of((pattern, _Row.parse(pattern, target)) for pattern, target in self._rows.items())
        self._names = tree_of((pattern, True) for pattern in self._ignored)

    @property
    def rows(self) -> Mapping[str, str]:
        """Checkpoint module pattern -> target, as written."""
        return self._rows

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensor names that are skipped."""
        return self._ignored

    @property
    def aside(self) -> tuple[str, ...]:
        """Patterns of modules that are skipped entirely."""
        return self._aside

    def replaced(self, rows: Mapping[str, str]) -> WeightMap:
        """Return this table with `rows` added; a row replaces the one with the same pattern."""
        return WeightMap({**self._rows, **rows}, ignored=self._ignored, aside=self._aside)

    def without(self, *patterns: str) -> WeightMap:
        """Return this table without the rows of these patterns. Raises KeyError for an unknown pattern."""
        rows = dict(self._rows)
        for pattern in patterns:
            del rows[pattern]
        return WeightMap(rows, ignored=self._ignored, aside=self._aside)

    def ignoring(self, *patterns: str) -> WeightMap:
        """Return this table with more ignored tensor names; a tied head adds "lm_head.weight"."""
        return WeightMap(self._rows, ignored=(*self._ignored, *patterns), aside=self._aside)

    def setting_aside(self, *patterns: str) -> WeightMap:
        """Return this table with more modules to skip entirely, such as layers that only predict further tokens."""
        return WeightMap(self._rows, ignored=self._ignored, aside=(*self._aside, *patterns))

    def with_optional_prefix(self, prefix: str) -> WeightMap:
        """Return this table for names with and without `prefix`, which files of a model saved without its head lack."""
        bare = {pattern.removeprefix(prefix): target for pattern, target in self._rows.items()}
        ignored = [pattern.removeprefix(prefix) for pattern in self._ignored]
        return WeightMap({**bare, **self._rows}, ignored=(*self._ignored, *ignored), aside=self._aside)

    def module_aside(self, name: str) -> str | None:
        """Return the skipped module that tensor `name` belongs to, or None."""
        segments = name.split(".")
        depths = [depth for depth, _, _ in walk(self._modules, segments)]
        return ".".join(segments[: depths[0]]) if depths else None

    def resolve(self, name: str) -> Target | None:
        """Return where tensor `name` goes, or None if it is skipped, like rotary buffers and cache scales. The longest
        matching row wins.

        Raises InvalidCheckpoint when no row matches.
        """
        segments = name.split(".")
        ignored = any(depth == len(segments) for depth, _, _ in walk(self._names, segments))
        if ignored or is_derived(name) or self.module_aside(name):
            return None
        found = [
            match
            for match in walk(self._tree, segments)
            if (match[0] == len(segments)) == (match[1].suffix is not None) and all(segments)
        ]
        if not found:
            raise InvalidCheckpoint(
                f"Tensor {short(name)} matches no row of the model's weight table. Check that config.json belongs to "
                f"these weights, and that the model is not quantized or an adapter."
            )
        depth, row, numbers = max(found, key=lambda match: match[0])
        suffix = row.suffix or ".".join(segments[depth:])
        module = PLACEHOLDER.sub(lambda match: str(numbers[match[1]]), row.module)
        index = None if row.index is None else numbers[row.index]
        return Target(module, tuple((suffix, part, index) for part in row.parts), row.layout)


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
        if target.stack is not None and isinstance(owner, Weighted) and owner.stored_experts is not None:
            target = self._settled(target.of_experts(owner.stored_experts), owner.stored_experts, offer.shape)
        _check(offer, target, self.expected, self.stored(target), self._features(target))
        for key in target.keys:
            other = self._filled.setdefault((target.module, key), offer.name)
            if other != offer.name:
                raise InvalidCheckpoint(
                    f"{offer.source}: tensors {short(other)} and {short(offer.name)} both fill "
                    f"{_describe(target.module, key)}. Remove one of them from the checkpoint."
                )
        self.targets[offer.name] = target

    def _settled(self, target: Target, experts: int, shape: Sequence[int]) -> Target:
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
            and owner.method.together
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

    def wanted(self, entry: TensorEntry) -> TensorEntry:
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
        return entry if some.stride and some.num_bytes < _LEAST_RUN * some.shape[0] else some

    def copy_own(self, name: str, tensor: Tensor) -> None:
        """Copy the part of a tensor that `wanted` returns to its target."""
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
                tensor = tensor.repeat_interleave(stored.features, 0)[: sum(sizes)]
            split = LAYOUTS[target.layout](tensor.movedim(axis, 0), sizes, owner)
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
    for module, count in Counter(map(table.module_aside, checkpoint.tensors)).items():
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

    stored = [plan.wanted(checkpoint.tensors[name]) for name in plan.targets if name not in checkpoint.expanded]
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
            f"{' '.join(refused[:_MAX_REFUSED])}{' ...' if len(refused) > _MAX_REFUSED else ''}",
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
    dtype = _FORMAT_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
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
    features: Sequence[int],
) -> None:
    """Refuse a tensor with the wrong dtype, target or shape. `features`: output features of each part."""
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
    wanted = list(known[0])
    if stored.axis is not None and wanted:
        wanted[stored.axis] = sum(shape[stored.axis] for shape in known)
        if stored.features > 1 and target.layout is not None:
            wanted[stored.axis] = -(-sum(features) // stored.features)
    if target.transposed:
        wanted.reverse()
    if target.stack is not None:
        parts = [shape for shape, key in zip(known, target.keys, strict=True) if key[2] == 0]
        outputs = sum(shape[0] for shape in parts)
        wanted = list(target.stack.shape(len(known) // len(parts), outputs, parts[0][1:]))
    if list(offer.shape) != wanted:
        raise InvalidCheckpoint(
            f"{offer.source}: tensor {short(offer.name)} has shape {short(list(offer.shape))}, and config.json asks "
            f"for {wanted}. Check that config.json belongs to these weights."
        )


def _describe(path: str, key: PartKey) -> str:
    suffix, part, index = key
    inner = ",".join(str(item) for item in (part, index) if item is not None)
    return f"{path}.{suffix}[{inner}]" if inner else f"{path}.{suffix}"
