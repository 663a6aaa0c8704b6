"""Phi-4-multimodal with images, as its authors published it and as transformers has it."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of
from asyncllm.vl.known_towers import phi4_tower
from asyncllm.vl.towers.phi4 import FOLD, Phi4VisionConfig

__all__ = ["read_phi4"]


def read_phi4(hf: HFConfig) -> Composed:
    tower = phi4_tower(hf.fields)
    encoder = clip_of(hf.changed({"vision_config": tower}), "phi4_multimodal_vision")
    if encoder.side % FOLD or tower.get("crop_size", encoder.image_size) != encoder.image_size:
        hf.unsupported("vision_config", "Supported: an even number of patches along each side of a crop.")
    last = tower.get("feature_layer", -2)
    if type(last) is not int or not -encoder.num_layers <= last < 0:
        hf.unsupported("vision_config", "Supported: feature_layer counted from the end, below 0.")
    vision = Phi4VisionConfig(encoder=encoder, read_layers=encoder.num_layers + 1 + last)
    return Composed(hf, "Phi3ForCausalLM", vision)
