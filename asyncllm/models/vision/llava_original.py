"""LLaVA 1.5, 1.6 and OneVision in their authors' format, and Yi-VL, which uses the same code.

config.json has the decoder's entries at the top level and names the tower, whose weights are in the model's files.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.llava import read_llava, read_onevision
from asyncllm.models.vision.parts import Composed
from asyncllm.vl.known_towers import tower_fields
from asyncllm.vl.towers.llava import LlavaConfig

__all__ = ["read_original_llava"]

TOWER = "vision_tower.vision_tower"


def read_original_llava(hf: HFConfig, decoder: str) -> Composed:
    """Read config.json. `decoder`: the decoder's model type."""
    hf.expect("mm_projector_type", "mlp2x_gelu", "mlp2x_gelu_Norm")
    hf.expect("mm_vision_select_feature", "patch", "cls_patch")
    hf.expect("mm_use_im_start_end", False)
    hf.expect("mm_newline_position", "one_token")
    ratio = hf.fields.get("image_aspect_ratio")
    one_vision = isinstance(ratio, str) and ratio.startswith("anyres_max_")
    tiled = one_vision or ratio == "anyres"
    if not one_vision:
        hf.expect("image_aspect_ratio", "pad", "square", "anyres")
    hf.expect("mm_patch_merge_type", "spatial_unpad" if tiled else "flat")
    if hf.fields.get("mm_projector_type") is None:
        hf.unsupported("mm_projector_type", "Supported: mlp2x_gelu and mlp2x_gelu_Norm, of LLaVA 1.5 and later.")
    tower = dict(tower_fields(Path(hf.source).parent, hf.fields.get("mm_vision_tower")))
    last = hf.fields.get("mm_vision_select_layer", -2)
    if one_vision:
        # The files lack the tower's last layer, which is not read.
        hf.expect("mm_vision_select_layer", -2)
        layers = HFConfig(tower, source=hf.source, session_len=None).integer("num_hidden_layers", 12) - 1
        tower["num_hidden_layers"], last = layers, -1
    kept = {key: value for key, value in hf.fields.items() if not key.startswith(("mm_", "image_"))}
    pinpoints = hf.fields.get("image_grid_pinpoints")
    if isinstance(pinpoints, list) and all(isinstance(each, list) and len(each) == 2 for each in pinpoints):
        # The authors' pairs are (width, height).
        pinpoints = [[height, width] for width, height in pinpoints]
    feature = hf.fields.get("mm_vision_select_feature", "patch")
    whole = hf.replaced(
        {
            "text_config": {**kept, "model_type": decoder},
            "vision_config": tower,
            "vision_feature_layer": last,
            "vision_feature_select_strategy": "default" if feature == "patch" and not one_vision else "full",
            "image_grid_pinpoints": pinpoints,
            **({"vision_aspect_ratio": ratio} if one_vision else {}),
        }
    )
    parts = read_onevision(whole) if one_vision else read_llava(whole, tiled=tiled)
    assert isinstance(parts.vision, LlavaConfig)
    norms = hf.fields["mm_projector_type"] == "mlp2x_gelu_Norm"
    vision = msgspec.structs.replace(parts.vision, source=TOWER, projector_norms=norms)
    return parts._replace(vision=vision)
