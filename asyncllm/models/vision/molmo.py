"""Molmo: config.json has the entries of the decoder, a Qwen2 or OLMo 2, at the top level under other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of
from asyncllm.text.checkpoint_files import read_json_object
from asyncllm.vl.image_tokens import token_of
from asyncllm.vl.known_towers import molmo_tower
from asyncllm.vl.processing.molmo import crop_grid
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.towers.molmo import MolmoConfig

__all__ = ["read_molmo"]

READ_LAYERS = (-2, -9)
"""The encoder's hidden states that are read, counted from the last."""
NUM_MARKS = 128

_LAYER, _OWN = "transformer.blocks.{i}", "layers.{i}"
_DECODER: Mapping[str, str] = {
    "transformer.wte.embedding": "embed:weight",
    f"{_LAYER}.att_proj": f"{_OWN}.attn.qkv[q+k+v]",
    f"{_LAYER}.attn_out": f"{_OWN}.attn.out",
    f"{_LAYER}.ff_proj": f"{_OWN}.mlp.gate_up[up+gate]",
    f"{_LAYER}.ff_out": f"{_OWN}.mlp.down",
    "transformer.ln_f": "norm",
    "transformer.ff_out": "head",
}
_QWEN2 = {f"{_LAYER}.attn_norm": f"{_OWN}.attn_norm", f"{_LAYER}.ff_norm": f"{_OWN}.mlp_norm"}
_OLMO2 = {
    f"{_LAYER}.attn_norm": f"{_OWN}.attn_post_norm",
    f"{_LAYER}.ff_norm": f"{_OWN}.mlp_post_norm",
    f"{_LAYER}.q_norm": f"{_OWN}.attn.q_norm",
    f"{_LAYER}.k_norm": f"{_OWN}.attn.k_norm",
}


def read_molmo(hf: HFConfig) -> Composed:
    hf.expect("layer_norm_type", "rms")
    hf.expect("weight_tying", False)
    hf.expect("moe_num_experts")
    hf.expect("clip_qkv")
    norm_after = hf.flag("norm_after", False)
    if hf.flag("attention_layer_norm", False) != norm_after or hf.flag("qkv_bias", False) == norm_after:
        hf.unsupported("norm_after", "Supported: Molmo-7B-D's and 72B's decoder, and Molmo-7B-O's.")
    text = hf.changed(_text_of(hf))
    tower = molmo_tower(hf.fields)
    encoder = clip_of(hf.changed({"vision_config": tower}))
    if encoder.num_layers < -min(READ_LAYERS):
        hf.invalid("vision_config", f"which has fewer than {-min(READ_LAYERS)} layers")
    folder, first = Path(hf.source).parent, text.integer("vocab_size")
    file = folder / "preprocessor_config.json"
    grid = crop_grid(tower, PictureSettings(read_json_object(file), str(file)))
    marks = {name: token_of(folder, f"<im_{name}>") - first for name in ("start", "end", "patch", "col")}
    if not all(0 <= each < NUM_MARKS for each in marks.values()):
        hf.invalid("vocab_size", "which does not match the tokenizer, whose tokens after the vocabulary are for images")
    vision = MolmoConfig(
        encoder=encoder,
        read_layers=(encoder.num_layers + 1 + READ_LAYERS[0], encoder.num_layers + 1 + READ_LAYERS[1]),
        intermediate_size=text.integer("intermediate_size"),
        grid=grid,
        num_marks=NUM_MARKS,
        start=marks["start"],
        end=marks["end"],
        patch=marks["patch"],
        row_end=marks["col"],
        decoder={**_DECODER, **(_OLMO2 if norm_after else _QWEN2)},
    )
    return Composed(text, "Olmo2ForCausalLM" if norm_after else "Qwen2ForCausalLM", vision)


def _text_of(hf: HFConfig) -> dict[str, Any]:
    """Return the decoder's entries under their usual names."""
    return {
        "vocab_size": hf.integer("embedding_size", hf.fields.get("vocab_size")),
        "intermediate_size": hf.integer("intermediate_size", minimum=2) // 2,
        "rms_norm_eps": hf.number("layer_norm_eps", 1e-5),
        "tie_word_embeddings": False,
    }
