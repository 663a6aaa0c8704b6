"""Vision-language models: a decoder of one of the text families, with a tower. What config.json says of both.

A row of `_READERS` reads the tower's part of an architecture's config.json. The decoder is the family of its text part,
built as ever: its weights have other prefixes, and the tower's rows come besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncllm.models.config import HFConfig
from asyncllm.models.weights import WeightMap
from asyncllm.vl.tower import TowerConfig
from asyncllm.vl.towers.clip import ClipConfig
from asyncllm.vl.towers.llava import LlavaConfig
from asyncllm.vl.towers.parts import ACTIVATIONS, TowerActivation

__all__ = ["VISION_MODELS", "Composed", "composed", "with_tower"]

_ACTIVATIONS: Mapping[str, TowerActivation] = {
    **{name: name for name in ACTIVATIONS},
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}
"""What transformers' classes have where a text_config leaves it out, as those of LLaVA's hub files do."""


class Composed(NamedTuple):
    """What config.json describes of a vision-language model."""

    text: HFConfig
    """That of the decoder alone."""
    model_type: str
    """The decoder's."""
    vision: TowerConfig


def composed(hf: HFConfig, architecture: str) -> Composed | None:
    """Return the two parts of a vision-language model; None for an architecture that is none.

    Raises InvalidCheckpoint, UnsupportedModel.
    """
    read = _READERS.get(architecture)
    return None if read is None else read(hf)


def with_tower(table: WeightMap, vision: TowerConfig) -> WeightMap:
    """Return a decoder's table for files that have a tower besides, under the prefixes of old and new hub layouts."""

    def prefixed(pattern: str) -> list[str]:
        inner = pattern.removeprefix("model.")
        moved = [f"model.language_model.{inner}"] if inner != pattern else []
        return [pattern, f"language_model.{pattern}", *moved]

    rows = {each: target for pattern, target in table.rows.items() for each in prefixed(pattern)}
    towers = {f"{prefix}{pattern}": target for pattern, target in vision.weights.items() for prefix in ("", "model.")}
    ignored = [f"{prefix}{name}" for name in table.ignored for prefix in ("", "language_model.")]
    unused = [f"{prefix}{name}" for name in vision.unused for prefix in ("", "model.")]
    return WeightMap({**rows, **towers}, ignored=ignored, aside=unused)


def _part(hf: HFConfig, key: str, defaults: Mapping[str, Any] | None = None) -> HFConfig:
    """Return an object of config.json as a config of its own."""
    value = hf.fields.get(key)
    if not isinstance(value, dict):
        hf.invalid(key, "where an object belongs")
    known = {name: each for name, each in value.items() if each is not None}
    return HFConfig(
        {**(defaults or {}), **known},
        source=f"{hf.source}: {key}",
        session_len=hf.session_len,
        rope_scaling_factor=hf.rope_scaling_factor,
    )


def _text(hf: HFConfig) -> tuple[HFConfig, str]:
    """Return the decoder's part, which inherits what is said of the whole, and its model type."""
    part = _part(hf, "text_config")
    model_type = part.fields.get("model_type", "llama")
    if not isinstance(model_type, str):
        part.invalid("model_type", "where a name belongs")
    part = _part(hf, "text_config", _TEXT_DEFAULTS.get(model_type))
    own = {
        key: part.fields.get(key, hf.fields.get(key))
        for key in ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    }
    return part.changed({key: value for key, value in own.items() if value is not None}), model_type


def _clip(hf: HFConfig) -> ClipConfig:
    """Return the encoder that `vision_config` describes. The defaults are those of transformers' classes."""
    part = _part(hf, "vision_config")
    part.expect("model_type", "clip_vision_model", "siglip_vision_model")
    clip = part.fields.get("model_type", "clip_vision_model") == "clip_vision_model"
    activation = part.fields.get("hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh")
    part.changed({"hidden_act": activation}).expect("hidden_act", *_ACTIVATIONS)
    part.expect("num_channels", 3)
    size, patch = part.integer("image_size", 224), part.integer("patch_size", 32 if clip else 16)
    hidden, heads = part.integer("hidden_size", 768), part.integer("num_attention_heads", 12)
    if size % patch or hidden % heads:
        part.invalid(
            "patch_size" if size % patch else "num_attention_heads", "which does not divide what it is a part of"
        )
    return ClipConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 3072),
        num_layers=part.integer("num_hidden_layers", 12),
        num_heads=heads,
        image_size=size,
        patch_size=patch,
        eps=part.number("layer_norm_eps", 1e-5 if clip else 1e-6),
        activation=_ACTIVATIONS[activation],
        has_class_token=clip,
    )


def _llava(hf: HFConfig, *, tiled: bool = False) -> Composed:
    text, model_type = _text(hf)
    encoder = _clip(hf)
    hf.expect("projector_hidden_act", *_ACTIVATIONS)
    hf.expect("vision_feature_select_strategy", "default", "full")
    layers = hf.fields.get("vision_feature_layer", -2)
    chosen = layers if isinstance(layers, list) else [layers]
    if not chosen or not all(type(each) is int and -encoder.num_layers <= each < 0 for each in chosen):
        hf.unsupported("vision_feature_layer", "Supported: layers counted from the end, below 0.")
    vision = LlavaConfig(
        encoder=encoder,
        feature_layers=tuple(encoder.num_layers + 1 + each for each in chosen),
        drops_class_token=hf.fields.get("vision_feature_select_strategy", "default") == "default",
        bias=hf.flag("multimodal_projector_bias", True),
        activation=_ACTIVATIONS[hf.fields.get("projector_hidden_act", "gelu")],
        pinpoints=_pinpoints(hf, encoder.image_size) if tiled else (),
    )
    return Composed(text, model_type, vision)


def _pinpoints(hf: HFConfig, side: int) -> tuple[tuple[int, int], ...]:
    default = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    shapes = hf.fields.get("image_grid_pinpoints", default)
    fits = isinstance(shapes, list) and all(
        isinstance(each, list) and len(each) == 2 and all(type(n) is int and n > 0 and n % side == 0 for n in each)
        for each in shapes
    )
    if not fits or not shapes:
        hf.invalid("image_grid_pinpoints", f"where pairs of multiples of {side} belong")
    return tuple((height, width) for height, width in shapes)


_READERS: Mapping[str, Callable[[HFConfig], Composed]] = {
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": lambda hf: _llava(hf, tiled=True),
}

VISION_MODELS: Mapping[str, str] = {
    "LlavaForConditionalGeneration": "LLaVA 1.5, as llava-hf has it",
    "LlavaNextForConditionalGeneration": "LLaVA 1.6 (NeXT), as llava-hf has it",
}
"""Architecture -> the models that come under it."""
