"""Vision-language models: a decoder of one of the text families, with a tower. What config.json says of both.

A row of `_READERS` reads the tower's part of an architecture's config.json. The decoder is the family of its text part,
built as ever: its weights have other prefixes, and the tower's rows come besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.weights import WeightMap
from asyncllm.vl.tower import TowerConfig
from asyncllm.vl.towers.clip import ClipConfig
from asyncllm.vl.towers.intern_vl import InternVLConfig
from asyncllm.vl.towers.llava import LlavaConfig
from asyncllm.vl.towers.parts import ACTIVATIONS, TowerActivation
from asyncllm.vl.towers.qwen_vl import QwenVLConfig

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
    decoder: str
    """Its architecture, or its model type."""
    vision: TowerConfig
    sections: tuple[int, ...] = ()
    """How its positions are divided among time, rows and columns (`RopeConfig.sections`)."""


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
    own = {key: part.fields.get(key, hf.fields.get(key)) for key in ("dtype", "torch_dtype", "quantization_config")}
    # Where either part says that they are tied they may be; `registry` looks whether there is a head.
    own["tie_word_embeddings"] = any(each.fields.get("tie_word_embeddings", False) for each in (part, hf))
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


def _deepseek(hf: HFConfig) -> Composed:
    text, decoder = _text(hf)
    encoder = msgspec.structs.replace(_clip(hf), final_norm=True)
    vision = LlavaConfig(
        encoder=encoder,
        feature_layers=(encoder.num_layers,),
        drops_class_token=encoder.has_class_token,
        bias=True,
        activation="gelu",
        source="vision_model",
    )
    return Composed(text, decoder, vision)


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


def _qwen(hf: HFConfig, *, gated: bool = False) -> Composed:
    if hf.fields.get("text_config") is None:
        # Published files have the decoder's entries beside the tower's.
        kept = {key: value for key, value in hf.fields.items() if key != "vision_config"}
        hf = hf.changed({"text_config": {**kept, "model_type": "qwen2"}})
    text, _ = _text(hf)
    text, sections = _sections(text)
    part = _part(hf, "vision_config")
    hidden = part.integer("hidden_size" if gated else "embed_dim", 1280)
    heads, patch, merge = (
        part.integer("num_heads", 16),
        part.integer("patch_size", 14),
        part.integer("spatial_merge_size", 2),
    )
    if hidden % heads or hidden // heads % 4:
        part.invalid("num_heads", "which leaves heads of a size that is no multiple of 4")
    activation = part.fields.get("hidden_act", "silu" if gated else "quick_gelu")
    part.changed({"hidden_act": activation}).expect("hidden_act", *_ACTIVATIONS)
    for key in ("in_channels", "in_chans"):
        part.expect(key, 3)
    depth = part.integer("depth", 32)
    full = part.fields.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full, list) or not all(type(each) is int for each in full):
        part.invalid("fullatt_block_indexes", "where a list of layers belongs")
    vision = QwenVLConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 3420) if gated else hidden * part.integer("mlp_ratio", 4),
        num_layers=depth,
        num_heads=heads,
        patch_size=patch,
        frames=part.integer("temporal_patch_size", 2),
        merge=merge,
        activation=_ACTIVATIONS[activation],
        gated=gated,
        window=part.integer("window_size", 112) // merge // patch if gated else None,
        full_layers=frozenset(full),
    )
    if vision.window == 0:
        part.invalid("window_size", "which is smaller than a square of patches")
    return Composed(text, "Qwen2ForCausalLM", vision, sections)


def _intern(hf: HFConfig) -> Composed:
    remote = hf.fields.get("llm_config") is not None
    if remote:
        hf = hf.changed({"text_config": hf.fields["llm_config"]})
    text, decoder = _text(hf)
    if remote:
        names = text.fields.get("architectures")
        decoder = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else decoder
    part = _part(hf, "vision_config")
    part.expect("hidden_act", *_ACTIVATIONS)
    part.expect("norm_type", "layer_norm", "rms_norm")
    part.expect("use_mask_token", False)
    part.expect("use_absolute_position_embeddings", True)
    part.expect("use_mean_pooling", True)
    hf.expect("downsample_ratio", 0.5)
    hf.expect("ps_version", "v1", "v2")
    hf.expect("projector_hidden_act", "gelu")
    hf.expect("vision_feature_select_strategy", "default")
    hf.expect("use_backbone_lora", 0)
    hf.expect("use_llm_lora", 0)
    layers, last = part.integer("num_hidden_layers", 24), hf.fields.get("select_layer", -1)
    last = hf.fields.get("vision_feature_layer", last)
    if type(last) is not int or not -layers <= last < 0:
        hf.unsupported("select_layer", "Supported: a layer counted from the end, below 0.")
    heads = part.integer("num_attention_heads", 16)
    hidden = part.integer("hidden_size", 1024)
    side, patch = _square(part, "image_size", 448), _square(part, "patch_size", 14)
    if hidden % heads or side % (2 * patch):
        part.invalid("image_size" if side % (2 * patch) else "num_attention_heads", "which does not divide evenly")
    vision = InternVLConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4096),
        num_layers=layers,
        read_layers=layers + 1 + last,
        num_heads=heads,
        image_size=side,
        patch_size=patch,
        eps=part.number("layer_norm_eps", 1e-6),
        activation=_ACTIVATIONS[part.fields.get("hidden_act", "gelu")],
        qkv_bias=part.flag("qkv_bias" if remote else "attention_bias", remote),
        qk_norm=part.flag("qk_normalization" if remote else "use_qk_norm", False),
        rms_norm=part.fields.get("norm_type", "layer_norm") == "rms_norm",
        fold=2,
        transposed=remote and hf.fields.get("ps_version", "v1") == "v1",
    )
    return Composed(text, decoder, vision)


def _square(part: HFConfig, key: str, default: int) -> int:
    """Return the side of a square that is given by one number, or by two equal ones."""
    value = part.fields.get(key, default)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return part.changed({key: value}).integer(key)


def _sections(text: HFConfig) -> tuple[HFConfig, tuple[int, ...]]:
    """Return the decoder's part with plain rotary entries, and how positions are divided. Raises InvalidCheckpoint."""
    key = "rope_parameters" if text.fields.get("rope_parameters") is not None else "rope_scaling"
    rope = text.fields.get(key)
    if not isinstance(rope, dict):
        text.invalid(key, "where an object with mrope_section belongs")
    sections = rope.get("mrope_section", [16, 24, 24])
    whole = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not whole or min(sections) < 1 or text.rope_scaling_factor:
        text.unsupported(key, "Supported: mrope_section, of three numbers, without another scaling.")
    plain = {name: value for name, value in rope.items() if name != "mrope_section"}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return text.changed({key: plain}), tuple(sections)


_READERS: Mapping[str, Callable[[HFConfig], Composed]] = {
    "DeepseekVLForConditionalGeneration": _deepseek,
    "InternVLChatModel": _intern,
    "InternVLForConditionalGeneration": _intern,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": lambda hf: _llava(hf, tiled=True),
    "Qwen2VLForConditionalGeneration": _qwen,
    "Qwen2_5_VLForConditionalGeneration": lambda hf: _qwen(hf, gated=True),
}

VISION_MODELS: Mapping[str, str] = {
    "DeepseekVLForConditionalGeneration": "DeepSeek-VL 1.3B, as transformers has it",
    "InternVLChatModel": "InternVL-Chat 1.5, InternVL2, InternVL2.5 and InternVL3, as their authors published them",
    "InternVLForConditionalGeneration": "the same, as transformers has them",
    "LlavaForConditionalGeneration": "LLaVA 1.5, as llava-hf has it",
    "LlavaNextForConditionalGeneration": "LLaVA 1.6 (NeXT), as llava-hf has it",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
}
"""Architecture -> the models that come under it."""
