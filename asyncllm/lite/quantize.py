"""Quantize a checkpoint layer by layer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncllm.errors import AsyncLLMError, InvalidCheckpoint, InvalidParameter, ModelError, UnsupportedModel, short
from asyncllm.layers.linear_method import UNQUANTIZED, Weighted
from asyncllm.lite.observed import InputStatistics, Observed
from asyncllm.lite.recipe import Recipe
from asyncllm.lite.search import Consumer
from asyncllm.lite.smoothing import Group, Masters, Rows, groups, plain_layers
from asyncllm.lite.tensors import StoredWeight, module_of_expert, restored, stored_weights
from asyncllm.lite.tower import copy_tower_files, tower_modules
from asyncllm.lite.unfinished import Unfinished, unfinished
from asyncllm.lite.walk import Batch, Comparison, Walk
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.output_folder import copy_companions, output_folder, write_shards
from asyncllm.models.loading.stream import FLOAT_DTYPES

__all__ = ["Progress", "QuantizeReport", "computes_the_same", "input_statistics", "quantize"]

logger = logging.getLogger("asyncllm")

Progress = Callable[[int, int], None]
"""Called with (finished layers, all layers)."""

Inputs = dict[tuple[int, int | None], InputStatistics]
"""(id of the layer, expert) -> statistics."""


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """The result of a quantization."""

    destination: Path
    num_bytes: int
    """Total size of all tensors."""
    num_tokens: int
    """Number of calibration tokens."""
    comparison: Comparison | None = None
    """Comparison with the original model on held-out texts, or None if there were none. Activations are not rounded in
    it."""


def _observe(walk: Walk, layer: int, batches: Sequence[Batch]) -> Inputs:
    """Run a filled layer on all batches, without changing them, and return the statistics of its projections'
    inputs."""
    found: Inputs = {}

    def add(layer: Weighted, expert: int | None, x: Tensor) -> None:
        key = (id(layer), expert)
        if key not in found:
            found[key] = InputStatistics.empty(x.shape[-1], x.device)
        found[key].add(x)

    weighted = [each for each in walk.layers[layer].modules() if isinstance(each, Weighted)]
    for each in weighted:
        each.method = Observed(add)
    for batch in batches:
        walk.run(layer, batch)
    for each in weighted:
        each.method = UNQUANTIZED
    return found


@torch.no_grad()
def input_statistics(
    walk: Walk, sequences: Sequence[Sequence[int]], *, tokens_at_once: int, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Return NAME.absmax and NAME.absmean, float32 [K], of the inputs of every projection NAME of the checkpoint."""
    batches = walk.begin(sequences, tokens_at_once)
    found: dict[str, Tensor] = {}
    count = len(walk.layers)
    for layer in range(count):
        walk.fill(f"layers.{layer}")
        inputs = _observe(walk, layer, batches)
        for stored in (each for name in walk.names(layer) for each in stored_weights(walk, name)):
            seen = inputs.get((id(stored.matrix.layer), stored.matrix.expert))
            if seen is not None and stored.suffix == "weight":
                # Projections with the same input share one vector, but a file stores each separately.
                found[f"{stored.module}.absmax"] = seen.largest.cpu().clone()
                found[f"{stored.module}.absmean"] = seen.mean.cpu()
        for batch in batches:
            batch.hidden = walk.run(layer, batch)
        walk.empty(f"layers.{layer}")
        if progress is not None:
            progress(layer + 1, count)
    return found


class _Quantizer:
    """One checkpoint that is being quantized."""

    def __init__(self, walk: Walk, recipe: Recipe, sequences: Sequence[Sequence[int]], tokens_at_once: int) -> None:
        self._walk, self._recipe = walk, recipe
        # Every tenth sequence is held out, to measure the loss of quality.
        kept_back = sequences[9::10]
        chosen = [each for number, each in enumerate(sequences) if number % 10 != 9]
        self.num_tokens = sum(map(len, chosen))
        self._batches = walk.begin(chosen, tokens_at_once)
        self._before = walk.begin(kept_back, tokens_at_once)
        self._after = walk.begin(kept_back, tokens_at_once)
        self.plain: list[str] = []
        self.quantized: list[str] = []
        self._entries = walk.checkpoint.tensors
        head = walk.model.head_name
        # In memory a tied model has a head too, and within a larger model's file the head has a longer name.
        heads = dict.fromkeys([head, *(name for name in self._entries if name.endswith(head))])
        self.plain += [name.removesuffix(".weight") for name in heads]
        self.plain += walk.modules_beside_layers + tower_modules(walk)

    def run(self, kept: Unfinished, progress: Progress | None) -> None:
        """Quantize the layers that are not finished yet."""
        batches = [*self._batches, *self._before, *self._after]
        done, hidden, names = kept.state()
        count = len(self._walk.layers)
        if done:
            logger.info("%d of %d layers are finished already", done, count)
            self.plain, self.quantized = names["plain"], names["quantized"]
            for batch, states in zip(batches, hidden, strict=True):
                batch.hidden = states
        for layer in range(done, count):
            names = {"plain": self.plain, "quantized": self.quantized}
            try:
                # The names and hidden states are those after the layer's last tensor.
                kept.finish(layer, self._layer(layer), (batch.hidden for batch in batches), names)
            except AsyncLLMError:
                # A resumed run would fail in the same way.
                kept.discard()
                raise
            if progress is not None:
                progress(layer + 1, count)

    def tensors(self, kept: Unfinished) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the new checkpoint, once all layers are finished."""
        count = len(self._walk.layers)
        inner = {name for layer in range(count) for name in self._walk.names(layer)}
        yield from self._walk.checkpoint.read([name for name in self._entries if name not in inner])
        for layer in range(count):
            yield from kept.tensors(layer)

    def comparison(self) -> Comparison | None:
        """Return how the quantized model differs from the original on the held-out texts."""
        return self._walk.compare(self._before, self._after) if self._before else None

    def _layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Quantize one layer and yield its tensors by their names in the file. The batches' hidden states become the
        quantized layer's output."""
        walk, part = self._walk, f"layers.{layer}"
        block = walk.fill(part)
        for batch in self._before:
            batch.hidden = walk.run(layer, batch)
        inputs = _observe(walk, layer, self._batches)
        masters, plain = Masters(block), plain_layers(walk.layers[layer])
        self._move_scales(layer, masters, inputs, {id(each) for each in plain})
        for name in walk.names(layer):
            weights = stored_weights(walk, name)
            rounded = [each for each in weights if each.suffix == "weight" and each.matrix.layer not in plain]
            for stored in rounded:
                yield from self._rounded(stored, masters, inputs)
            if not rounded:
                kept = list(restored(walk.plan, name, weights, masters, self._entries[name].dtype))
                yield from kept or walk.checkpoint.read([name])
                self.plain += [each.module for each in weights if each.suffix == "weight"]
        masters.write_back()
        for batch in (*self._batches, *self._after):
            batch.hidden = walk.run(layer, batch)
        walk.empty(part)

    def _rounded(self, stored: StoredWeight, masters: Masters, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        """Round a weight in place and yield its tensors by their names in the file."""
        master = masters.weight(stored.matrix)
        rounded = self._recipe.round(master[stored.rows], inputs.get((id(stored.matrix.layer), stored.matrix.expert)))
        master[stored.rows] = rounded.values
        self.quantized.append(stored.module)
        for suffix, tensor in rounded.tensors.items():
            whole = tensor.t() if suffix == "weight" and stored.transposed else tensor
            yield f"{stored.module}.{suffix}", whole.cpu().contiguous()

    def _move_scales(self, layer: int, masters: Masters, inputs: Inputs, plain: set[int]) -> None:
        """Move scales, group by group, so that the layer's output stays the same."""
        walk = self._walk
        first = self._batches[0] if self._batches else None
        before = None if first is None else walk.run(layer, first)
        moved = False
        for group in groups(walk.layers[layer]):
            rounded = [each for each in group.consumers if id(each.layer) not in plain]
            consumers = [
                Consumer(masters.weight(each), inputs[id(each.layer), each.expert])
                for each in rounded
                if (id(each.layer), each.expert) in inputs
            ]
            scales = self._recipe.scales(group, consumers) if consumers else None
            if scales is None:
                continue
            moved = True
            if len(rounded) < len(group.consumers):
                # Powers of two change no bit of a weight that is not rounded again.
                scales = scales.log2().round().exp2()
            taken = group.at_inputs(masters.move(group, scales, self._type_of(group)))
            for consumer in group.consumers:
                statistics = inputs.get((id(consumer.layer), consumer.expert))
                if statistics is not None:
                    statistics.divide(taken)
        if not moved or first is None or before is None:
            return
        masters.write_back()
        after = walk.run(layer, first)
        if not computes_the_same(before, after, first.hidden):
            raise ModelError(
                f"Moving scales within layer {layer} changed what it computes, so nothing is written. Use "
                f"auto_gptq with search_scale=False, or blocked_fp8, which move none, and report the model."
            )

    def _type_of(self, group: Group) -> torch.dtype:
        """Return the dtype in the file of the module that produces the group's features."""
        plan = self._walk.plan
        producer = group.producer.matrix.layer if isinstance(group.producer, Rows) else group.producer
        name = next(name for name in plan.targets if plan.owner(name) is producer)
        return FLOAT_DTYPES[self._entries[name].dtype]


def computes_the_same(before: Tensor, after: Tensor, given: Tensor) -> bool:
    """Return whether a layer changes hidden states `given` to `after` as it changed them to `before`, all [T, hidden].

    A tenth of the tokens may differ: of experts that are nearly as good, the last bit of a router's input chooses.
    """
    differences, changes = (each.float().norm(dim=1) for each in (after - before, before - given))
    closest = differences.argsort()[: -(-9 * len(differences) // 10)]
    tolerance = 1e-3 if before.dtype == torch.float32 else 5e-2
    return bool(differences[closest].norm() <= tolerance * changes[closest].norm() + 1e-6)


def _check_tensors(walk: Walk, recipe: Recipe) -> None:
    """Refuse tensors that the files cannot store, by their headers. Raises InvalidCheckpoint and UnsupportedModel."""
    folder = walk.checkpoint.folder
    for layer, block in enumerate(walk.layers):
        plain = {id(each) for each in plain_layers(block)}
        for name in walk.names(layer):
            target, owner = walk.plan.targets[name], walk.plan.owner(name)
            if not isinstance(owner, Weighted) or id(owner) in plain or target.keys[0][0] != "weight":
                continue
            if not _has_place(walk, name):
                raise UnsupportedModel(
                    f"{folder}: {short(name)} has no place in quantized files, which name weights by their modules. "
                    f"Convert the checkpoint to one with a module for each weight."
                )
            sizes = [walk.checkpoint.tensors[name].shape[:: -1 if target.transposed else 1]]
            if target.stack is not None:
                sizes = [owner.whole_shapes[part] for part in dict.fromkeys(part for _, part, _ in target.keys)]
            for n, k in sizes:
                try:
                    recipe.check(n, k)
                except InvalidCheckpoint as error:
                    raise InvalidCheckpoint(f"{folder}: {short(name)}: {error}.") from None
                except InvalidParameter as error:
                    raise InvalidParameter(f"{short(name)}: {error}", error.param) from None


def _has_place(walk: Walk, name: str) -> bool:
    """Return whether quantized files can hold the weight of tensor `name`, or of each expert that it holds."""
    target = walk.plan.targets[name]
    if target.stack is None:
        return name.endswith(".weight")
    return all(module_of_expert(walk, name, part) for part in dict.fromkeys(part for _, part, _ in target.keys))


def quantize(
    folder: Path,
    destination: Path,
    recipe: Recipe,
    sequences: Sequence[Sequence[int]],
    *,
    tokens_at_once: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize the checkpoint in `folder` with `recipe`, calibrated on token sequences, and write it to `destination`.

    The model runs layer by layer: the device's memory holds one layer at a time, twice in float32, and the host's
    memory the hidden states of all sequences. The folder appears complete or not at all. An interrupted run resumes
    after its last finished layer if all inputs are the same.

    Raises InvalidCheckpoint, UnsupportedModel and InvalidParameter for checkpoints that cannot be quantized in this
    way, ModelError if the folder cannot be written.
    """
    walk = Walk(folder, dtype, device)
    _check_tensors(walk, recipe)
    how = [recipe, tokens_at_once, dtype, device.type, sequences]
    with ExitStack() as stack:
        kept = stack.enter_context(unfinished(destination, _fingerprint(walk.checkpoint, *how)))
        stack.enter_context(torch.no_grad())
        quantizer = _Quantizer(walk, recipe, sequences, tokens_at_once)
        quantizer.run(kept, progress)
        partial = stack.enter_context(output_folder(destination, walk.checkpoint.num_bytes))
        write_shards(quantizer.tensors(kept), partial)
        copy_companions(folder, partial)
        copy_tower_files(folder, partial)
        within = dict.fromkeys(_within_block(name) for name in quantizer.quantized)
        plain = [name for name in quantizer.plain if "." in name]
        _write_settings(partial, recipe.settings(quantizer.plain, list(within) if plain else []))
        written = Checkpoint.open(partial)
        comparison = quantizer.comparison()
    return QuantizeReport(destination, written.num_bytes, quantizer.num_tokens, comparison)


def _fingerprint(checkpoint: Checkpoint, *how: object) -> str:
    """Return a digest of everything that determines the result: the headers, sizes and times of the files, and
    `how`."""
    files = sorted({each.file for each in checkpoint.tensors.values()} | {checkpoint.folder / "config.json"})
    stats = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    described = [version("asyncllm"), torch.__version__, stats, list(checkpoint.tensors.values()), how]
    return sha256(repr(described).encode()).hexdigest()


def _within_block(module: str) -> str:
    """Return the part of a module's name after the number of its layer."""
    segments = module.split(".")
    number = next(place for place, segment in enumerate(segments) if segment.isdecimal())
    return ".".join(segments[number + 1 :])


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    text = json.dumps({**fields, "quantization_config": settings}, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
