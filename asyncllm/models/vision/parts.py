"""Readers shared by the families: the decoder's and the tower's parts of a vision-language model's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.text_defaults import TEXT_DEFAULTS
from asyncllm.vl.tower import TowerConfig
from asyncllm.vl.towers.clip import ClipConfig
from asyncllm.vl.towers.parts import ACTIVATIONS, TowerActivation

__all__ = [
    "TOWER_ACTIVATIONS",
    "Composed",
    "axes_of",
    "clip_of",
    "depth_of",
    "expect_usual_rotation",
    "part_of",
    "rotary_heads",
    "square_of",
    "text_of",
    "with_text",
    "without",
]

TOWER_ACTIVATIONS: Mapping[str, TowerActivation] = {
    **{name: name for name in ACTIVATIONS},
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_OF_AXES = ("mrope_section", "mrope_interleaved", "interleaved")

MAX_PAIRS = 1024
"""Maximum number of rotated pairs of a head."""


class Composed(NamedTuple):
    """The configs of the parts of a vision-language model."""

    text: HFConfig
    """Config of the decoder."""
    decoder: str
    """Architecture or model type of the decoder."""
    vision: TowerConfig
    axes: tuple[int, ...] = ()
    """The axis, of time, rows and columns, that rotates each pair (`RopeConfig.axes`)."""


def part_of(hf: HFConfig, key: str, defaults: Mapping[str, Any] | None = None) -> HFConfig:
    """Return an object in config.json as a config of its own, with `defaults` for entries that are absent or null.
    Raises InvalidCheckpoint if there is none."""
    value = hf.fields.get(key)
    if not isinstance(value, dict):
        hf.invalid(key, "where an object belongs")
    known = {name: each for name, each in value.items() if each is not None}
    return hf.replaced({**(defaults or {}), **known}, source=f"{hf.source}: {key}")


def without(hf: HFConfig, key: str) -> HFConfig:
    """Return the decoder's part of a file with the decoder's entries at the top level: all but the tower's `key`."""
    return hf.replaced({name: value for name, value in hf.fields.items() if name != key})


def with_text(hf: HFConfig, model_type: str) -> HFConfig:
    """Move the decoder's entries of early files, which have them at the top level, into a `text_config` of this type.
    A file with a `text_config` is returned unchanged."""
    if hf.fields.get("text_config") is not None:
        return hf
    kept = {key: value for key, value in hf.fields.items() if key != "vision_config"}
    return hf.changed({"text_config": {**kept, "model_type": model_type}})


def text_of(hf: HFConfig, usual: str = "llama", *, tied: bool = False) -> tuple[HFConfig, str]:
    """Return the decoder's part, which inherits dtype and quantization of the whole, and its model type, `usual` by
    default. `tied`: whether embeddings are tied by default. Raises InvalidCheckpoint."""
    part = part_of(hf, "text_config")
    model_type = part.fields.get("model_type", usual)
    if not isinstance(model_type, str):
        part.invalid("model_type", "where a name belongs")
    part = part_of(hf, "text_config", TEXT_DEFAULTS.get(model_type))
    # A family may distinguish null from an absent entry: for Mistral, null means no window and absence the default one.
    null = dict.fromkeys(name for name in hf.fields["text_config"] if name not in part.fields)
    own = {key: part.fields.get(key, hf.fields.get(key)) for key in ("dtype", "torch_dtype", "quantization_config")}
    # Either part may declare tied embeddings; `registry` checks whether the files have a head.
    said = (part.fields.get("tie_word_embeddings", False), hf.fields.get("tie_word_embeddings", tied))
    own["tie_word_embeddings"] = any(said)
    return part.changed({**null, **{key: value for key, value in own.items() if value is not None}}), model_type


def clip_of(hf: HFConfig, *others: str, usual: Mapping[str, Any] | None = None) -> ClipConfig:
    """Return the config of the CLIP or SigLIP in `vision_config`. The defaults are those of transformers' classes,
    overridden by `usual`. `others`: further model types that are SigLIPs. Raises InvalidCheckpoint,
    UnsupportedModel."""
    part = part_of(hf, "vision_config", usual)
    part.expect("model_type", "clip_vision_model", "siglip_vision_model", *others)
    clip = part.fields.get("model_type", "clip_vision_model") == "clip_vision_model" and not others
    activation = part.fields.get("hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh")
    part.changed({"hidden_act": activation}).expect("hidden_act", *TOWER_ACTIVATIONS)
    part.expect("num_channels", 3)
    size, patch = part.integer("image_size", 224), part.integer("patch_size", 32 if clip else 16)
    hidden, heads = part.integer("hidden_size", 768), part.integer("num_attention_heads", 12)
    if size < patch or hidden % heads:
        part.invalid(
            "patch_size" if size < patch else "num_attention_heads", "which does not divide what it is a part of"
        )
    return ClipConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 3072),
        num_layers=part.integer("num_hidden_layers", 12),
        num_heads=heads,
        image_size=size,
        patch_size=patch,
        eps=part.number("layer_norm_eps", 1e-5 if clip else 1e-6),
        activation=TOWER_ACTIVATIONS[activation],
        has_class_token=clip,
    )


def depth_of(hf: HFConfig, key: str, layer: Any, count: int) -> int:
    """Return the number of layers, of an encoder with `count`, after which hidden states are read. `layer`: the entry
    `key` in transformers' numbering, from 0, the first layer's input, or backwards from -1. Raises UnsupportedModel."""
    if type(layer) is not int or not -count - 1 <= layer <= count:
        hf.unsupported(key, f"Supported: hidden states from 0 to {count}, or from -1 backwards to {-count - 1}.")
    return layer % (count + 1)


def square_of(part: HFConfig, key: str, default: int) -> int:
    """Return the side of a square, given as one number or as two equal ones. Raises InvalidCheckpoint."""
    value = part.fields.get(key, default)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return part.changed({key: value}).integer(key)


def rotary_heads(part: HFConfig, hidden_size: int, key: str, default: int | None = None) -> int:
    """Return the number of heads of a tower with two-dimensional rotary positions. Raises InvalidCheckpoint unless it
    divides hidden_size and the size of a head is a multiple of 4."""
    heads = part.integer(key) if default is None else part.integer(key, default)
    if hidden_size % heads or hidden_size // heads % 4:
        part.invalid(key, "which leaves heads whose size is not a multiple of 4")
    return heads


def expect_usual_rotation(part: HFConfig) -> None:
    """Raise UnsupportedModel unless a tower's rotary settings are those of all published models."""
    rope = part.fields.get("rope_parameters")
    known = {"rope_type": ("axial", "default"), "rope_theta": (10000.0, 10000)}
    if rope is not None and not (
        isinstance(rope, dict) and all(key in known and value in known[key] for key, value in rope.items())
    ):
        part.unsupported("rope_parameters", "Supported: rope_type = 'axial' with rope_theta = 10000.0.")


def axes_of(
    text: HFConfig, *, interleaved: bool = False, usual: Sequence[int] = (16, 24, 24)
) -> tuple[HFConfig, tuple[int, ...]]:
    """Return the decoder's part with ordinary rotary entries, and the axis of positions that rotates each pair (M-RoPE:
    Wang et al., 2024).

    The numbers of pairs for time, rows and columns are `mrope_section`, by default `usual`. The pairs of an axis are
    adjacent, or `interleaved`: they alternate until those of rows and columns are used up. Raises InvalidCheckpoint,
    UnsupportedModel.
    """
    key = "rope_parameters" if text.fields.get("rope_parameters") is not None else "rope_scaling"
    rope = text.fields.get(key)
    absent = rope is None
    rope = {} if absent else rope
    if not isinstance(rope, dict):
        text.invalid(key, "where an object with mrope_section belongs")
    sections = rope.get("mrope_section", list(usual))
    whole = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not whole or min(sections) < 1 or sum(sections) > MAX_PAIRS or text.rope_scaling_factor:
        text.unsupported(key, "Supported: mrope_section, of three numbers, without another scaling.")
    if rope.get("mrope_interleaved", interleaved) is not interleaved:
        text.unsupported(key, f"Supported: mrope_interleaved = {interleaved} for this model.")
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        if any(axis + 3 * (sections[axis] - 1) >= len(axes) for axis in (1, 2)):
            text.invalid(key, "whose mrope_section has more rows or columns than time")
        axes = [0] * len(axes)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    plain = {name: value for name, value in rope.items() if name not in _OF_AXES}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return text if absent else text.changed({key: plain}), tuple(axes)
