"""LLaVA, LLaVA-NeXT, LLaVA-OneVision and ViP-LLaVA, and DeepSeek-VL and Janus, whose towers have the same parts."""

from __future__ import annotations

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, clip_of, depth_of, part_of, square_of, text_of
from asyncllm.models.vision.pixtral import read_pixtral
from asyncllm.vl.towers.llava import LlavaConfig

__all__ = ["read_deepseek_vl", "read_janus", "read_llava", "read_onevision", "read_vip_llava"]

MAX_TILES = 1024

_STRATEGY = "vision_feature_select_strategy"
"""The entry that says whether the first token, that of CLIP's class, is dropped. Tiles have tokens of patches only."""


def read_llava(
    hf: HFConfig,
    *,
    tiled: bool = False,
    layers: str = "vision_feature_layer",
    usual: str = "llama",
    tower: str = "clip_vision_model",
) -> Composed:
    """Read config.json. `layers`: the entry that names the hidden states to read. `usual` and `tower`: default model
    types of the decoder and the tower."""
    part = hf.fields.get("vision_config")
    if isinstance(part, dict) and part.get("model_type") == "pixtral":
        return read_pixtral(hf)
    text, model_type = text_of(hf, usual)
    encoder = clip_of(hf, usual={"model_type": tower})
    hf.expect("projector_hidden_act", *TOWER_ACTIVATIONS)
    fits = ("default" if encoder.has_class_token else "full",) if tiled else ("default", "full")
    hf.changed({_STRATEGY: hf.fields.get(_STRATEGY, "default")}).expect(_STRATEGY, *fits)
    named = hf.fields.get(layers, -2)
    chosen = named if isinstance(named, list) and named else [named]
    vision = LlavaConfig(
        encoder=encoder,
        feature_layers=tuple(depth_of(hf, layers, each, encoder.num_layers) for each in chosen),
        drops_class_token=hf.fields.get(_STRATEGY, "default") == "default",
        bias=hf.flag("multimodal_projector_bias", True),
        activation=TOWER_ACTIVATIONS[hf.fields.get("projector_hidden_act", "gelu")],
        pinpoints=_pinpoints(hf, encoder.image_size) if tiled else (),
    )
    return Composed(text, model_type, vision)


def read_onevision(hf: HFConfig) -> Composed:
    usual = {
        "projector_hidden_act": "gelu",
        _STRATEGY: "full",
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "vision_aspect_ratio": "anyres_max_9",
    }
    hf = hf.completed(usual)
    ratio = hf.fields["vision_aspect_ratio"]
    tiles = ratio.removeprefix("anyres_max_") if isinstance(ratio, str) else ""
    if not tiles.isdecimal() or not 1 <= int(tiles) <= MAX_TILES:
        hf.unsupported("vision_aspect_ratio", "Supported: anyres_max_9, or another number.")
    parts = read_llava(hf, tiled=True, usual="qwen2", tower="siglip_vision_model")
    vision = parts.vision
    assert isinstance(vision, LlavaConfig)
    return parts._replace(vision=msgspec.structs.replace(vision, max_patches=int(tiles) * vision.encoder.side**2))


def read_deepseek_vl(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf, tied=True)
    usual = {"model_type": "siglip_vision_model"}
    encoder = msgspec.structs.replace(clip_of(hf, usual=usual), final_norm=True)
    vision = LlavaConfig(
        encoder=encoder,
        feature_layers=(encoder.num_layers,),
        drops_class_token=encoder.has_class_token,
        bias=True,
        activation="gelu",
        source="vision_model",
    )
    return Composed(text, decoder, vision)


def read_janus(hf: HFConfig) -> Composed:
    part = part_of(hf, "vision_config", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16})
    part.expect("model_type", "janus_vision_model")
    part.expect("use_qk_norm", False)
    for key, only in (("attention_bias", True), ("depth", 2)):
        part.changed({key: part.fields.get(key, only)}).expect(key, only)
    hidden, activation = part.integer("hidden_size"), part.fields.get("hidden_act", "gelu")
    part.changed({"hidden_act": activation}).expect("hidden_act", *TOWER_ACTIVATIONS)
    siglip = {
        **part.fields,
        "model_type": "siglip_vision_model",
        "intermediate_size": int(hidden * part.number("mlp_ratio", 4.0)),
        "image_size": square_of(part, "image_size", 384),
        "patch_size": square_of(part, "patch_size", 16),
        "hidden_act": activation,
    }
    parts = read_deepseek_vl(hf.changed({"vision_config": siglip}))
    return parts._replace(vision=msgspec.structs.replace(parts.vision, activation=TOWER_ACTIVATIONS[activation]))


def read_vip_llava(hf: HFConfig) -> Composed:
    """Read config.json. Features of several layers are concatenated and normalized."""
    layers = "vision_feature_layer" if "vision_feature_layer" in hf.fields else "vision_feature_layers"
    parts = read_llava(hf.changed({layers: hf.fields.get(layers, [-2, -5, -8, -11, 6])}), layers=layers)
    eps = hf.number("projector_layernorm_eps", 1e-5)
    return parts._replace(vision=msgspec.structs.replace(parts.vision, input_eps=eps))


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
