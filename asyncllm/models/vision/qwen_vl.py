"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, the thinkers of Qwen2.5-Omni and Qwen3-Omni, and EXAONE 4.5."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import (
    TOWER_ACTIVATIONS,
    Composed,
    axes_of,
    expect_usual_rotation,
    part_of,
    rotary_heads,
    square_of,
    text_of,
    with_text,
)
from asyncllm.vl.towers.qwen3_vl import Qwen3VLConfig
from asyncllm.vl.towers.qwen_vl import QwenVLConfig

__all__ = ["read_exaone4_5", "read_omni", "read_qwen3_5", "read_qwen3_vl", "read_qwen_vl"]


def read_qwen_vl(hf: HFConfig, *, gated: bool = False) -> Composed:
    name = "qwen2_5_vl_text" if gated else "qwen2_vl_text"
    text, _ = text_of(with_text(hf, name), name)
    text, axes = axes_of(text)
    part = part_of(hf, "vision_config", {"hidden_size": 3584})
    return Composed(text, "Qwen2ForCausalLM", _patches_tower(part, gated=gated), axes)


def read_exaone4_5(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf, "exaone4")
    part = part_of(hf, "vision_config", {"hidden_size": 3584})
    vision, shared = _patches_tower(part, gated=True), part.integer("num_key_value_heads", 8)
    if vision.num_heads % shared:
        part.invalid("num_key_value_heads", f"which does not divide {vision.num_heads} heads")
    vision = msgspec.structs.replace(vision, num_kv_heads=shared)
    # Early files have another model type.
    return Composed(text, "exaone4" if decoder == "exaone4_5_text" else decoder, vision)


def _patches_tower(part: HFConfig, *, gated: bool) -> QwenVLConfig:
    hidden = part.integer("hidden_size" if gated else "embed_dim", 1280)
    heads = rotary_heads(part, hidden, "num_heads", 16)
    patch, merge = part.integer("patch_size", 14), part.integer("spatial_merge_size", 2)
    activation = part.fields.get("hidden_act", "silu" if gated else "quick_gelu")
    part.changed({"hidden_act": activation}).expect("hidden_act", *TOWER_ACTIVATIONS)
    for key in ("in_channels", "in_chans"):
        part.expect(key, 3)
    expect_usual_rotation(part)
    depth = part.integer("depth", 32)
    full = part.fields.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full, list) or not all(type(each) is int for each in full):
        part.invalid("fullatt_block_indexes", "where a list of layers belongs")
    vision = QwenVLConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 3420) if gated else hidden * part.integer("mlp_ratio", 4),
        num_layers=depth,
        num_heads=heads,
        patch_size=patch,
        frames=part.integer("temporal_patch_size", 2),
        merge=merge,
        activation=TOWER_ACTIVATIONS[activation],
        gated=gated,
        window=part.integer("window_size", 112) // merge // patch if gated else None,
        full_layers=frozenset(full),
    )
    if vision.window == 0:
        part.invalid("window_size", "which is smaller than a square of patches")
    return vision


def read_qwen3_vl(hf: HFConfig, *, sparse: bool = False) -> Composed:
    text, _ = text_of(hf, "qwen3_vl_text", tied=sparse)
    text, axes = axes_of(text, interleaved=True, usual=(24, 20, 20))
    if sparse:
        text.expect("norm_topk_prob", True)
        text = text.changed({"norm_topk_prob": True})
    vision = _deep_tower(part_of(hf, "vision_config", {"deepstack_visual_indexes": [8, 16, 24]}), text)
    return Composed(text, "Qwen3MoeForCausalLM" if sparse else "Qwen3ForCausalLM", vision, axes)


def read_omni(hf: HFConfig, read: Callable[[HFConfig], Composed]) -> Composed:
    """Return the thinker's parts of a Qwen-Omni. `read`: the reader of the vision-language model with the same
    parts."""
    thinker = hf.fields.get("thinker_config")
    parts = read(hf.changed(thinker) if isinstance(thinker, dict) else hf)
    return parts._replace(vision=msgspec.structs.replace(parts.vision, in_thinker=True))


def read_qwen3_5(hf: HFConfig, *, sparse: bool = False) -> Composed:
    text, _ = text_of(hf)
    text, axes = axes_of(text, interleaved=True, usual=(11, 11, 10))
    vision = _deep_tower(part_of(hf, "vision_config", {"deepstack_visual_indexes": []}), text)
    return Composed(text, "Qwen3_5MoeForCausalLM" if sparse else "Qwen3_5ForCausalLM", vision, axes)


def _deep_tower(part: HFConfig, text: HFConfig) -> Qwen3VLConfig:
    hidden = part.integer("hidden_size", 1152)
    part.expect("in_channels", 3)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    expect_usual_rotation(part)
    depth, positions = part.integer("depth", 27), part.integer("num_position_embeddings", 2304)
    side = math.isqrt(positions)
    if side * side != positions:
        part.invalid("num_position_embeddings", "which is not a square number")
    deep = part.fields["deepstack_visual_indexes"]
    if not isinstance(deep, list) or deep != sorted({each for each in deep if type(each) is int and 0 <= each < depth}):
        part.invalid("deepstack_visual_indexes", f"where layers below {depth} belong, in order")
    if len(deep) >= text.integer("num_hidden_layers"):
        part.unsupported("deepstack_visual_indexes", "Supported: fewer of them than the decoder has layers.")
    part.expect("out_hidden_size", text.integer("hidden_size"))
    return Qwen3VLConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4304),
        num_layers=depth,
        num_heads=rotary_heads(part, hidden, "num_heads", 16),
        patch_size=square_of(part, "patch_size", 16),
        frames=part.integer("temporal_patch_size", 2),
        merge=part.integer("spatial_merge_size", 2),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "gelu_pytorch_tanh")],
        side=side,
        deep_layers=tuple(deep),
    )
