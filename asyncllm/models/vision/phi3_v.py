"""Phi-3-vision and Phi-3.5-vision: config.json has the decoder's entries at the top level and names the tower."""

from __future__ import annotations

from pathlib import Path

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of, depth_of, part_of
from asyncllm.vl.known_towers import tower_fields
from asyncllm.vl.towers.hd import FOLD, HdConfig

__all__ = ["read_phi3_v"]

SOURCE = "vision_embed_tokens"
_JOINING = {
    f"{SOURCE}.sub_GN": "vision.row_end:weight",
    f"{SOURCE}.glb_GN": "vision.separator:weight",
    f"{SOURCE}.img_projection.0": "vision.projector_1",
    f"{SOURCE}.img_projection.2": "vision.projector_2",
    # The decoder's embedding is stored under its usual name or under this one.
    f"{SOURCE}.wte": "embed",
}


def read_phi3_v(hf: HFConfig) -> Composed:
    named, joined = part_of(hf, "img_processor"), part_of(hf, "embd_layer")
    named.expect("name", "clip_vision_model")
    named.expect("type_feature", "patch")
    for key in ("use_hd_transform", "with_learnable_separator"):
        joined.changed({key: joined.fields.get(key, False)}).expect(key, True)
    joined.changed({"hd_transform_order": joined.fields.get("hd_transform_order", "glb_sub")}).expect(
        "hd_transform_order", "sub_glb"
    )
    joined.changed({"projection_cls": joined.fields.get("projection_cls", "linear")}).expect("projection_cls", "mlp")
    fields = tower_fields(Path(hf.source).parent, named.fields.get("model_name"))
    encoder = clip_of(hf.changed({"vision_config": dict(fields)}))
    named.expect("image_dim_out", encoder.hidden_size)
    if encoder.side % FOLD:
        named.invalid("model_name", "whose patches along a side are not even in number")
    vision = HdConfig(
        encoder=encoder,
        read_layers=depth_of(named, "layer_idx", named.fields.get("layer_idx", -2), encoder.num_layers),
        source=f"{SOURCE}.img_processor.vision_model",
        names=_JOINING,
    )
    return Composed(hf, "Phi3ForCausalLM", vision)
