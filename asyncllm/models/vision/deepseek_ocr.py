"""DeepSeek-OCR, whose decoder is a DeepSeek of the first generation."""

from __future__ import annotations

from pathlib import Path

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.deepseek_vl2 import decoder_of
from asyncllm.models.vision.parts import Composed, part_of
from asyncllm.vl.known_towers import ocr_tile
from asyncllm.vl.towers.clip import ClipConfig
from asyncllm.vl.towers.deepseek_ocr import DeepseekOcrConfig
from asyncllm.vl.towers.sam import SamConfig

__all__ = ["read_deepseek_ocr"]

PATCH, SHRUNK = 16, 4


def read_deepseek_ocr(hf: HFConfig) -> Composed:
    text, decoder = decoder_of(hf)
    hf.expect("tile_tag", "2D")
    joined, vision = part_of(hf, "projector_config"), part_of(hf, "vision_config")
    joined.expect("projector_type", "linear")
    joined.expect("n_embed", text.integer("hidden_size"))
    vision.expect("model_name", "deeplip_b_l")
    widths = part_of(vision, "width")
    clip, sam = part_of(widths, "clip-l-14-224"), part_of(widths, "sam_vit_b")
    size, tile = vision.integer("image_size", 1024), ocr_tile(Path(hf.source).parent)
    if size % (PATCH * SHRUNK) or tile % (PATCH * SHRUNK):
        vision.invalid("image_size", f"which, like tile_size = {tile}, must be a multiple of {PATCH * SHRUNK} pixels")
    width, heads, depth = clip.integer("width", 1024), clip.integer("heads", 16), sam.integer("layers", 12)
    channels, layers = sam.fields.get("downsample_channels", [512, width]), sam.fields.get("global_attn_indexes")
    if not isinstance(channels, list) or len(channels) != 2 or type(channels[0]) is not int or channels[1] != width:
        sam.invalid("downsample_channels", f"where two numbers belong, the last one {width}")
    layers = [2, 5, 8, 11] if layers is None else layers
    if not isinstance(layers, list) or not layers or not all(type(n) is int and 0 <= n < depth for n in layers):
        sam.invalid("global_attn_indexes", f"where layers below {depth} belong")
    large = sam.integer("width", 768)
    if width % heads or large % sam.integer("heads", 12):
        widths.invalid("sam_vit_b", "where heads do not divide widths, or in clip-l-14-224")
    joined.expect("input_dim", 2 * width)
    return Composed(
        text,
        decoder,
        DeepseekOcrConfig(
            large=SamConfig(
                hidden_size=large,
                intermediate_size=4 * large,
                output_channels=sam.integer("output_channels", 256),
                num_layers=depth,
                num_heads=sam.integer("heads", 12),
                image_size=size,
                patch_size=PATCH,
                window=sam.integer("window_size", 14),
                global_layers=tuple(layers),
                eps=1e-6,
                activation="gelu",
                qkv_bias=True,
            ),
            small=ClipConfig(
                hidden_size=width,
                intermediate_size=4 * width,
                num_layers=clip.integer("layers", 24),
                num_heads=heads,
                image_size=clip.integer("image_size", 224),
                patch_size=clip.integer("patch_size", 14),
                eps=1e-5,
                activation="quick_gelu",
            ),
            channels=(channels[0], width),
            tile=tile,
        ),
    )
