"""Opens quantized checkpoints and installs their methods in the layers of a model, which its weight table finds."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.layers.embedding import Embedding, OutputEmbedding
from asyncllm.layers.linear_method import LinearMethod, Weighted
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expanded import ExpandedCheckpoint
from asyncllm.quant.scheme import Scheme
from asyncllm.quant.settings import Header

__all__ = ["attach", "open_checkpoint"]

logger = logging.getLogger("asyncllm")


def open_checkpoint(folder: Path, scheme: Scheme | None) -> Checkpoint:
    """Return the checkpoint in `folder`, with weights that the scheme expands as plain ones. Raises as
    `Checkpoint.open` does, and for tensors that do not fit together."""
    stored = Checkpoint.open(folder)
    if scheme is None:
        return stored
    headers = {entry.name: Header(entry.dtype, entry.shape) for entry in stored.tensors.values()}
    try:
        expansions = list(scheme.expansions(headers, lambda names: _read(stored, names)))
    except (InvalidCheckpoint, UnsupportedModel) as error:
        raise type(error)(f"{folder}: {error}") from None
    return ExpandedCheckpoint(stored, expansions) if expansions else stored


def _read(stored: Checkpoint, names: Sequence[str]) -> Mapping[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stored.read(names)}


def attach(model: DecoderLM, checkpoint: Checkpoint, scheme: Scheme) -> None:
    """Replace plain methods by the scheme's. The model is on the meta device.

    Only the headers of the files are read. Raises InvalidCheckpoint and UnsupportedModel, which name the tensors.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Weighted)}
    quantized = len(checkpoint.expanded)
    for path, modules in _modules(model, checkpoint).items():
        layer = layers.get(path)
        if layer is None:
            continue
        if scheme.at_load and (isinstance(layer, Embedding | OutputEmbedding) or layer.shard == "replicated"):
            continue
        methods = {name: scheme.method(name, tensors) for name, tensors in modules.items()}
        method = _one(methods, path, checkpoint)
        if method is None:
            continue
        first = next(iter(modules))
        if layer.gelu:
            raise UnsupportedModel(
                f"{checkpoint.folder}: {short(first)} is of quantized experts with GELU, which are not implemented. "
                f"Use a checkpoint that keeps the experts in 16 bits."
            )
        if isinstance(layer, Embedding):
            raise UnsupportedModel(
                f"{checkpoint.folder}: {short(first)} is a quantized token embedding, which is not implemented. Use a "
                f"checkpoint that keeps the embedding in 16 bits."
            )
        try:
            layer.attach(method)
            layer.expected_parts()
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{checkpoint.folder}: {short(first)}: {error}.") from None
        quantized += 1
    if not quantized:
        raise InvalidCheckpoint(
            f"{checkpoint.folder}: config.json says that the weights are quantized, and the files hold no tensor that "
            f"is. Use the config.json of these weights, or remove its quantization_config."
        )
    logger.info("%s: %d of %d layers with a weight are quantized", checkpoint.folder, quantized, len(layers))


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
