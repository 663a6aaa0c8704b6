"""Idefics3 and SmolVLM."""

from __future__ import annotations

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of, text_of
from asyncllm.vl.towers.idefics3 import Idefics3TowerConfig

__all__ = ["read_idefics3"]


def read_idefics3(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf)
    usual = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    types = ("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")
    encoder = msgspec.structs.replace(clip_of(hf, *types, usual=usual), final_norm=True)
    fold = hf.integer("scale_factor", 2)
    if encoder.side % fold:
        hf.invalid("scale_factor", f"which does not divide {encoder.side} patches")
    return Composed(text, decoder, Idefics3TowerConfig(encoder=encoder, fold=fold))
