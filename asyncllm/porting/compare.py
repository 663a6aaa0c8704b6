"""Runs the same tokens through a checkpoint here and in transformers, and finds where they diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.errors import InvalidParameter, UnsupportedFeature, UnsupportedModel
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.porting.module_io import Call, recorded
from asyncllm.porting.step_context import make_step_context

__all__ = ["Comparison", "Difference", "compare"]

TOLERANCE = 1e-3
"""Sums in another order differ by some 1e-6 of the whole in float32, and different computations by far more."""

_EMBEDDING, _LOGITS = "embedding", "logits"


class Difference(NamedTuple):
    """The difference between the two models at one place."""

    place: str
    """ "embedding", "layer 3" (the residual stream after it), "layer 3 attention" and "layer 3 mlp" (their outputs),
    "logits"."""
    largest: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference, divided by the norm in transformers."""


class Comparison(NamedTuple):
    """The differences at all places, in the order of computation."""

    differences: list[Difference]
    tolerance: float

    @property
    def first(self) -> Difference | None:
        """The first place whose difference exceeds `tolerance`; None if there is none.

        Inner modules are considered only in a layer whose stream differs, because families may divide the work
        differently there.
        """
        for index, each in enumerate(self.differences):
            if each.place.count(" ") < 2 and not each.relative <= self.tolerance:
                inner = [
                    other
                    for other in self.differences[:index]
                    if other.place.startswith(f"{each.place} ") and not other.relative <= self.tolerance
                ]
                return inner[0] if inner else each
        return None


def compare(
    folder: Path,
    *,
    tokens: Sequence[int] | None = None,
    count: int = 32,
    seed: int = 0,
    device: str = "cpu",
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Run the checkpoint in `folder` here and in transformers, in float32, on `tokens`, or `count` random ones.

    Both models are in memory at the same time. Raises UnsupportedFeature without transformers, UnsupportedModel for a
    class that it lacks, InvalidParameter for tokens beyond the vocabulary or the context, for a negative tolerance or
    NaN, and for "cuda" without a GPU, and the errors of `open_model`.
    """
    if not tolerance >= 0:
        raise InvalidParameter(f"tolerance = {tolerance} is negative or no number. Give 0 or more.", "tolerance")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device is 'cuda', and torch finds no GPU. Use device='cpu'.", "device")
    ours = open_model(folder, dtype=torch.float32, device=torch.device(device))
    vocab, longest = ours.config.vocab_size, ours.config.max_position
    given = count if tokens is None else len(tokens)
    if not 1 <= given <= longest:
        name = "count" if tokens is None else "tokens"
        raise InvalidParameter(f"{name} asks for {given} tokens; this model takes 1 to {longest}.", name)
    if tokens is None:
        tokens = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    if not all(0 <= token < vocab for token in tokens):
        raise InvalidParameter(f"tokens are to be numbers from 0 to {vocab - 1}.", "tokens")
    theirs = _open_theirs(folder, device)
    ids = torch.tensor([list(tokens)], device=device)
    with torch.inference_mode():
        mine, expected = _run_ours(ours, ids), _run_theirs(theirs, ids, len(ours.layers))
    places = [place for place in mine if place in expected and mine[place].shape == expected[place].shape]
    return Comparison([_difference(place, mine[place], expected[place]) for place in places], tolerance)


def _difference(place: str, mine: Tensor, expected: Tensor) -> Difference:
    apart = (mine.double() - expected.double()).cpu()
    norm = float(expected.double().norm())
    return Difference(place, float(apart.abs().max()), float(apart.norm()) / (norm or 1.0))


def _open_theirs(folder: Path, device: str) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UnsupportedFeature(
            "The comparison needs transformers, which is not installed. `pip install transformers`.", "transformers"
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{folder}: transformers does not open this checkpoint ({_first_line(error)}). Compare one whose class it "
            f"has; code beside a checkpoint is not run."
        ) from error
    opened: nn.Module = model.train(False).to(device)
    return opened


def _first_line(error: Exception) -> str:
    """Return what happened, without the list of all classes that transformers has."""
    return str(error).partition("\n")[0]


def _run_ours(model: DecoderLM, ids: Tensor) -> dict[str, Tensor]:
    layers: list[Any] = list(model.layers)
    modules: dict[str, nn.Module] = {}
    for index, block in enumerate(layers):
        # Some layers have only one of the two.
        inner = {f"layer {index} attention": block.attn, f"layer {index} mlp": block.mlp}
        modules |= {f"layer {index}": block, **{name: each for name, each in inner.items() if each is not None}}
    with recorded(modules) as calls:
        logits = model.logits(model(make_step_context(ids, model=model, block_size=16)))
    found = {_EMBEDDING: calls["layer 0"][0].args[1]}
    for name in _by_layer(modules):
        output = calls[name][0].output
        found[name] = output[0] + output[1] if name.count(" ") == 1 else output
    return {**found, _LOGITS: logits}


def _run_theirs(model: nn.Module, ids: Tensor, num_layers: int) -> dict[str, Tensor]:
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers)
    layers = next(lists, None)
    if layers is None:
        raise UnsupportedModel(f"{type(model).__name__} of transformers has no list of {num_layers} layers.")
    modules: dict[str, nn.Module] = {}
    for index, layer in enumerate(layers):
        modules[f"layer {index}"] = layer
        for kind, inner in (("attention", _attention(layer)), ("mlp", _mlp(layer))):
            if inner is not None:
                modules[f"layer {index} {kind}"] = inner
    with recorded(modules) as calls:
        logits: Tensor = model(ids, use_cache=False).logits
    first = calls["layer 0"][0]
    found = {_EMBEDDING: _input(first)}
    for name in _by_layer(modules):
        if calls[name]:
            output = calls[name][0].output
            found[name] = output[0] if isinstance(output, tuple | list) else output
    return {name: each.flatten(0, -2) for name, each in {**found, _LOGITS: logits}.items()}


def _input(call: Call) -> Tensor:
    given: Tensor = call.args[0] if call.args else call.kwargs["hidden_states"]
    return given


def _by_layer(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names in order, attention and MLP before their layer."""
    return sorted(modules, key=lambda name: (int(name.split()[1]), name.count(" ") == 1, name))


def _attention(layer: nn.Module) -> nn.Module | None:
    kinds = {type(each).__name__: each for each in reversed(list(layer.modules()))}
    # Where a layer has both, attention is part of what the mixer reads (Zamba).
    return next((each for kind in ("Mixer", "Attention") for name, each in kinds.items() if name.endswith(kind)), None)


def _mlp(layer: nn.Module) -> nn.Module | None:
    kinds = ("mlp", "moe", "moeblock", "ffn", "feedforward", "experts")
    return next((each for each in layer.children() if type(each).__name__.lower().endswith(kinds)), None)
