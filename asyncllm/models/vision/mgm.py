"""MGM and Mini-Gemini: config.json has the decoder's entries at the top level and names two towers, whose weights are
in the model's files."""

from __future__ import annotations

from pathlib import Path

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of, depth_of
from asyncllm.vl.known_towers import fine_tower_fields, tower_fields
from asyncllm.vl.towers.convnext import ConvNextConfig
from asyncllm.vl.towers.mgm import MgmConfig

__all__ = ["read_mgm"]

MAX_GRID = 8


def read_mgm(hf: HFConfig) -> Composed:
    hf.changed({"mm_projector_type": hf.fields.get("mm_projector_type", "linear")}).expect(
        "mm_projector_type", "mlp2x_gelu"
    )
    hf.expect("mm_vision_select_feature", "patch")
    hf.expect("mm_use_im_start_end", False)
    hf.expect("image_aspect_ratio", "pad", "square")
    folder = Path(hf.source).parent
    small = clip_of(hf.changed({"vision_config": dict(tower_fields(folder, hf.fields.get("mm_vision_tower")))}))
    fields = fine_tower_fields(folder, hf.fields.get("mm_vision_tower_aux"))
    large = ConvNextConfig(depths=tuple(fields["depths"]), sizes=tuple(fields["hidden_sizes"]))
    last = hf.fields.get("mm_vision_select_layer", -2)
    grid, side, whole = hf.integer("image_grid", 1), hf.integer("image_size_aux"), hf.flag("image_global", False)
    if grid > MAX_GRID or (whole and grid == 1):
        hf.unsupported("image_grid", f"Supported: up to {MAX_GRID}, and with image_global = true from 2 on.")
    cell = large.patch_size * 2 ** (len(large.sizes) - 1)
    if side % cell or side % (large.patch_size * grid * small.side):
        hf.invalid("image_size_aux", f"where a multiple of {cell} belongs that has whole cells in each patch")
    vision = MgmConfig(
        small=small,
        large=large,
        read_layers=depth_of(hf, "mm_vision_select_layer", last, small.num_layers),
        grid=grid,
        whole=whole,
    )
    kept = {key: value for key, value in hf.fields.items() if not key.startswith(("mm_", "image_"))}
    return Composed(hf.replaced({**kept, "model_type": "llama"}), "llama", vision)
