"""LFM2-VL."""

from __future__ import annotations

import math

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, clip_of, part_of, text_of
from asyncllm.vl.towers.lfm2_vl import Lfm2VLConfig

__all__ = ["read_lfm2_vl"]


def read_lfm2_vl(hf: HFConfig) -> Composed:
    tied = hf.fields.get("tie_embedding", hf.fields.get("tie_word_embeddings", True))
    text, decoder = text_of(hf.changed({"tie_word_embeddings": tied}), "lfm2")
    part = part_of(hf, "vision_config")
    places = part.integer("num_patches", 256)
    side = math.isqrt(places)
    if side * side != places:
        part.invalid("num_patches", "which is not a square number")
    tower = {**part.fields, "image_size": side * part.integer("patch_size", 16)}
    encoder = clip_of(hf.changed({"vision_config": tower}), "siglip2_vision_model")
    hf.expect("projector_hidden_act", *TOWER_ACTIVATIONS)
    vision = Lfm2VLConfig(
        encoder=msgspec.structs.replace(encoder, final_norm=True),
        fold=hf.integer("downsample_factor", 2),
        inner_size=hf.integer("projector_hidden_size", 2560),
        activation=TOWER_ACTIVATIONS[hf.fields.get("projector_hidden_act", "gelu")],
        bias=hf.flag("projector_bias", True),
        normed=hf.flag("projector_use_layernorm", True),
    )
    return Composed(text, decoder, vision)
