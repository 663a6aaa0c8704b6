"""Pixtral in transformers' format, Mistral Small 3.1 and later, and LightOnOCR, which has the same tower."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import (
    TOWER_ACTIVATIONS,
    Composed,
    depth_of,
    part_of,
    rotary_heads,
    square_of,
    text_of,
)
from asyncllm.vl.towers.pixtral import PixtralConfig

__all__ = ["read_lighton_ocr", "read_mistral3", "read_pixtral"]

_MERGING = ("mistral3", "lighton_ocr")


def read_pixtral(hf: HFConfig) -> Composed:
    hf.expect("vision_feature_select_strategy", "full")
    return _read(hf, layer=-2, bias=True, merge=1, usual="llama")


def read_mistral3(hf: HFConfig) -> Composed:
    return _read(hf, layer=-1, bias=False, merge=hf.integer("spatial_merge_size", 2), usual="mistral")


def read_lighton_ocr(hf: HFConfig) -> Composed:
    names = ("vision_encoder", "vision_projection")
    return _read(hf, layer=-1, bias=False, merge=hf.integer("spatial_merge_size", 2), names=names, usual="qwen3")


def _read(
    hf: HFConfig,
    *,
    layer: int,
    bias: bool,
    merge: int,
    usual: str,
    names: tuple[str, str] = ("vision_tower", "multi_modal_projector"),
) -> Composed:
    """Read config.json. `layer`, `bias` and `usual`: the default layer to read, bias of the projector and model type of
    the decoder. `names`: as in PixtralConfig."""
    text, decoder = text_of(hf, usual, tied=usual != "llama")
    part = part_of(hf, "vision_config")
    part.expect("model_type", "pixtral")
    part.expect("num_channels", 3)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    hf.expect("projector_hidden_act", *TOWER_ACTIVATIONS)
    hidden = part.integer("hidden_size", 1024)
    heads = rotary_heads(part, hidden, "num_attention_heads", 16)
    part.expect("head_dim", hidden // heads)
    layers, last = part.integer("num_hidden_layers", 24), hf.fields.get("vision_feature_layer", layer)
    rope = part.fields.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        part.unsupported("rope_parameters", "Supported: rope_type = 'axial'.")
    theta = part.changed({"rope_theta": rope.get("rope_theta", part.fields.get("rope_theta", 10000.0))})
    vision = PixtralConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4096),
        num_layers=layers,
        read_layers=depth_of(hf, "vision_feature_layer", last, layers),
        num_heads=heads,
        patch_size=square_of(part, "patch_size", 16),
        theta=theta.number("rope_theta"),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "gelu")],
        merge=merge,
        merge_eps=text.number("rms_norm_eps", 1e-6) if hf.fields.get("model_type") in _MERGING else None,
        bias=hf.flag("multimodal_projector_bias", bias),
        names=names,
        projector_activation=TOWER_ACTIVATIONS[hf.fields.get("projector_hidden_act", "gelu")],
    )
    return Composed(text, decoder, vision)
