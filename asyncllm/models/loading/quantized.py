"""Opens quantized checkpoints and installs their methods in the layers of a model, which its weight table finds."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.layers.embedding import Embedding, OutputEmbedding
from asyncllm.layers.linear_method import UNQUANTIZED, LinearMethod, Weighted
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.expanded import ExpandedCheckpoint
from asyncllm.quant.expanded_methods import expansion_of_method
from asyncllm.quant.expansion import modules_of
from asyncllm.quant.packed import Packed
from asyncllm.quant.scaled import Scaled
from asyncllm.quant.scheme import Scheme
from asyncllm.quant.settings import Header

__all__ = ["attach", "open_checkpoint"]

logger = logging.getLogger("asyncllm")


def open_checkpoint(folder: Path, scheme: Scheme | None, expanded_modules: Set[str] = frozenset()) -> Checkpoint:
    """Return the checkpoint in `folder`, with weights that the scheme expands, and those of `expanded_modules`, as
    plain ones. Raises as `Checkpoint.open` does, and for tensors that do not fit together."""
    stored = Checkpoint.open(folder)
    if scheme is None:
        return stored
    headers = {entry.name: Header(entry.dtype, entry.shape) for entry in stored.tensors.values()}
    try:
        expansions = list(scheme.expansions(headers, lambda names: _read(stored, names)))
        modules = modules_of(headers) if expanded_modules else {}
        for module in sorted(expanded_modules):
            tensors = modules.get(module, {})
            expansion = expansion_of_method(module, tensors, scheme.method(module, tensors))
            if expansion is not None:
                expansions.append(expansion)
    except (InvalidCheckpoint, UnsupportedModel) as error:
        raise type(error)(f"{folder}: {error}") from None
    return ExpandedCheckpoint(stored, expansions) if expansions else stored


def _read(stored: Checkpoint, names: Sequence[str]) -> Mapping[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stored.read(names)}


def attach(model: DecoderLM, checkpoint: Checkpoint, scheme: Scheme) -> Checkpoint:
    """Replace plain methods by the scheme's, and return the checkpoint to load. The model is on the meta device.

    The weights of a layer that no method serves are expanded in that checkpoint. Only the headers of the files are
    read. Raises InvalidCheckpoint and UnsupportedModel, which name the tensors.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Weighted)}
    quantized = len(checkpoint.expanded)
    every = _modules(model, checkpoint)
    found = {path: modules for path, modules in every.items() if path in layers}
    # Towers and projectors have layers of their own kinds.
    aside = {
        name: tensors
        for path, modules in every.items()
        for name, tensors in modules.items()
        if path not in layers and not scheme.at_load and scheme.method(name, tensors) is not None
    }
    clipped = {path.rpartition(".")[0] for path, layer in layers.items() if layer.clipped}
    unserved: dict[str, UnsupportedModel] = {}
    for path, modules in found.items():
        layer = layers[path]
        plain = isinstance(layer, Embedding | OutputEmbedding) or layer.shard == "replicated"
        if scheme.at_load and (plain or (layer.num_experts is not None and path.rpartition(".")[0] in clipped)):
            continue
        methods = {name: scheme.method(name, tensors) for name, tensors in modules.items()}
        if not any(methods.values()):
            continue
        try:
            _attach(layer, methods, path, checkpoint)
        except UnsupportedModel as error:
            unserved[path] = error
        quantized += 1
    if not quantized:
        raise InvalidCheckpoint(
            f"{checkpoint.folder}: config.json says that the weights are quantized, and the files hold no tensor that "
            f"is. Use the config.json of these weights, or remove its quantization_config."
        )
    logger.info("%s: %d of %d layers with a weight are quantized", checkpoint.folder, quantized, len(layers))
    if not unserved and not aside:
        return checkpoint
    model.expanded_modules = aside.keys() | _unserved_modules(scheme, layers, found, unserved)
    return open_checkpoint(checkpoint.folder, scheme, model.expanded_modules)


def _attach(layer: Weighted, methods: Mapping[str, LinearMethod | None], path: str, checkpoint: Checkpoint) -> None:
    """Give a layer the method of its modules. Raises InvalidCheckpoint, and UnsupportedModel if there is none."""
    first, method = next(iter(methods)), _one(methods, path, checkpoint)
    assert method is not None
    if layer.gelu or layer.clipped or isinstance(layer, Embedding):
        experts = "experts with GELU" if layer.gelu else "experts with limits of SwiGLU"
        what = "a token embedding" if isinstance(layer, Embedding) else experts
        raise UnsupportedModel(
            f"{checkpoint.folder}: {short(first)} is of {what}, which is not implemented for {method.name} weights. "
            f"Use a checkpoint that keeps it in 16 bits."
        )
    try:
        layer.attach(method)
        layer.expected_parts()
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{checkpoint.folder}: {short(first)}: {error}.") from None


def _unserved_modules(
    scheme: Scheme,
    layers: Mapping[str, Weighted],
    found: Mapping[str, Mapping[str, Mapping[str, Header]]],
    unserved: Mapping[str, UnsupportedModel],
) -> Set[str]:
    """Return the modules of `unserved` layers, which are plain ones again. Raises the layer's error if one of its
    modules cannot be expanded."""
    # One op takes both products of experts.
    experts = {path.rpartition(".")[0] for path in unserved if layers[path].num_experts is not None}
    beside = [path for path in found if layers[path].num_experts is not None and path.rpartition(".")[0] in experts]
    for path in {*unserved, *beside}:
        layers[path].attach(UNQUANTIZED)
    for path, error in unserved.items():
        methods = {name: scheme.method(name, tensors) for name, tensors in found[path].items()}
        if not any(isinstance(method, Packed | Scaled) for method in methods.values()) or scheme.at_load:
            raise error
    return {name for path in (*unserved, *beside) for name in found[path]}


def _modules(model: DecoderLM, checkpoint: Checkpoint) -> Mapping[str, Mapping[str, Mapping[str, Header]]]:
    """Return path of a layer -> the checkpoint's modules that fill it -> their tensors by suffix."""
    table = model.weight_map
    found: dict[str, dict[str, dict[str, Header]]] = defaultdict(lambda: defaultdict(dict))
    for entry in checkpoint.tensors.values():
        try:
            target = table.resolve(entry.name)
        except InvalidCheckpoint:
            # The loader refuses it, and names it and its file.
            continue
        if target is not None:
            suffix = target.keys[0][0]
            module = entry.name.removesuffix(f".{suffix}")
            if module == entry.name:
                # It has a row of its own: experts.down_proj_blocks is one of the tensors of `experts`.
                module = entry.name.rpartition(".")[0]
            found[target.module][module][suffix] = Header(entry.dtype, entry.shape)
    return found


def _one(methods: Mapping[str, LinearMethod | None], path: str, checkpoint: Checkpoint) -> LinearMethod | None:
    """Return the single method of all modules of a layer."""
    first, method = next(iter(methods.items()))
    for name, other in methods.items():
        if other != method:
            raise UnsupportedModel(
                f"{checkpoint.folder}: {short(first)} and {short(name)} are one layer of the model, {path}, and are "
                f"quantized in different ways. Use a checkpoint that quantizes both or neither."
            )
    return method
