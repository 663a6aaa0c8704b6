"""InternLM-XComposer2, 2-4KHD and 2.5: config.json has the decoder's entries at the top level, and the authors' code in
the folder tells the versions apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from asyncllm.layers.image_low_rank import LowRankProducts
from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of
from asyncllm.vl.known_towers import xcomposer_kind, xcomposer_tower
from asyncllm.vl.tower import TowerConfig
from asyncllm.vl.towers.clip import ClipConfig
from asyncllm.vl.towers.hd import FOLD, HdConfig
from asyncllm.vl.towers.llava import LlavaConfig

__all__ = ["read_xcomposer2"]

_LAYER, _OWN = "model.layers.{i}", "layers.{i}"
_PRODUCTS = {
    "attention.wqkv": ("attn.qkv", "", "q+k+v:grouped"),
    "attention.wo": ("attn.out", "", ""),
    "feed_forward.w1": ("mlp.gate_up", "gate", "gate"),
    "feed_forward.w3": ("mlp.gate_up", "up", "up"),
    "feed_forward.w2": ("mlp.down", "", ""),
}
"""The checkpoint's linear layer -> its target, and the parts of the target to which its factors A and B belong."""


def _row(part: str) -> str:
    return f"[{part}]" if part else ""


WEIGHTS: Mapping[str, str] = {
    f"{_LAYER}.{theirs}.Plora_{factor}": f"{_OWN}.{own}.image_rows.{factor.lower()}{_row(part)}"
    for theirs, (own, a, b) in _PRODUCTS.items()
    for factor, part in (("A", a), ("B", b))
}

RANK = 256

_JOINING = {
    "plora_sub_GN": "vision.row_end:weight",
    "plora_glb_GN": "vision.separator:weight",
    "vision_proj.0": "vision.projector_1",
    "vision_proj.2": "vision.projector_2",
}


def read_xcomposer2(hf: HFConfig) -> Composed:
    kind = xcomposer_kind(Path(hf.source).parent)
    given = hf.fields.get("vision_config")
    tower = part_of(hf if given else hf.changed({"vision_config": {}}), "vision_config")
    tower = tower.changed(xcomposer_tower(hf.fields, kind))
    encoder = ClipConfig(
        hidden_size=tower.integer("hidden_size"),
        intermediate_size=tower.integer("intermediate_size"),
        num_layers=tower.integer("num_hidden_layers"),
        num_heads=tower.integer("num_attention_heads"),
        image_size=tower.integer("image_size"),
        patch_size=tower.integer("patch_size"),
        eps=1e-5,
        activation="quick_gelu",
    )
    if encoder.image_size % (encoder.patch_size * (1 if kind == "2" else FOLD)):
        hf.invalid("img_size", f"which is not made of patches of {encoder.patch_size}")
    ranks = {"attn.qkv": (8, 2.0)} if kind == "4khd" else {}
    products = LowRankProducts(weights=WEIGHTS, rank=RANK, ranks=ranks)
    vision: TowerConfig
    if kind == "2":
        vision = LlavaConfig(
            encoder=encoder,
            feature_layers=(encoder.num_layers,),
            drops_class_token=True,
            bias=True,
            activation="gelu",
            source="vit.vision_tower",
            image_rows=products,
        )
    else:
        vision = HdConfig(
            encoder=encoder,
            read_layers=encoder.num_layers,
            source="vit.vision_tower.vision_model",
            names=_JOINING,
            whole_first=True,
            image_rows=products,
        )
    return Composed(hf, "InternLM2ForCausalLM", vision)
