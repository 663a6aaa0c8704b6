"""MiniCPM-Llama3-V-2.5 and MiniCPM-V-2.6, 4 and 4.5: config.json has the decoder's entries at the top level, and a
`vision_config`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of
from asyncllm.vl.towers.minicpm_v import HEAD_SIZE, MiniCPMVConfig

__all__ = ["read_minicpm_v"]

DECODERS: Mapping[str, str] = {
    "2.5": "LlamaForCausalLM",
    "2.6": "Qwen2ForCausalLM",
    "4.0": "LlamaForCausalLM",
    "4.5": "Qwen3ForCausalLM",
}

_TOWER = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}


def read_minicpm_v(hf: HFConfig) -> Composed:
    version = str(hf.fields.get("version", ""))
    if version not in DECODERS:
        hf.unsupported("version", f"Supported: {', '.join(DECODERS)}.")
    encoder = clip_of(hf, "idefics2", "siglip", usual=_TOWER)
    if hf.flag("drop_vision_last_layer", True):
        encoder = msgspec.structs.replace(encoder, num_layers=encoder.num_layers - 1)
    if hf.integer("hidden_size") % HEAD_SIZE:
        hf.invalid("hidden_size", f"which is not a multiple of {HEAD_SIZE}")
    vision = MiniCPMVConfig(
        encoder=msgspec.structs.replace(encoder, final_norm=True),
        num_queries=hf.integer("query_num", 64),
        plane=version != "2.5",
    )
    return Composed(hf, DECODERS[version], vision)
