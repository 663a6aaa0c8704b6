"""Other names for what is in the checkpoints of `tests/vl/checkpoints.py`: those of older files, and authors' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Fields", "Tensors", "classes_of"]

Fields = dict[str, Any]
Tensors = dict[str, Tensor]


def flat(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """The decoder's entries beside the tower's."""
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    fields["torch_dtype"] = fields.pop("dtype")
    return {**text, **fields}, tensors


def moved_llava(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """The names within a running model of transformers 5."""

    def moved(name: str) -> str:
        name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "language_model.")
        return name if name.startswith("lm_head") else f"model.{name}"

    return fields, {moved(name): tensor for name, tensor in tensors.items()}


def old_llava(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    return fields, {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()
    }


def original_llava(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """LLaVA 1.6 of its authors. The tower's config lies in a folder of its own, as Yi-VL's does."""
    names = {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.",
        "vision_tower.": "model.vision_tower.vision_tower.vision_model.",
        "multi_modal_projector.linear_1.": "model.mm_projector.0.",
        "multi_modal_projector.linear_2.": "model.mm_projector.2.",
        "image_newline": "model.image_newline",
    }

    def renamed(name: str) -> str:
        theirs = next(each for each in names if name.startswith(each))
        return names[theirs] + name.removeprefix(theirs)

    tiled = "image_grid_pinpoints" in fields
    moved = {renamed(name): tensor for name, tensor in tensors.items()}
    # Older files have it.
    moved["model.vision_tower.vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    return {
        **{key: value for key, value in fields["text_config"].items() if key not in ("architectures", "model_type")},
        "architectures": ["LlavaMistralForCausalLM" if tiled else "LlavaLlamaForCausalLM"],
        "model_type": "llava_mistral" if tiled else "llava",
        "mm_vision_tower": "./vit/tiny",
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": 24,
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "tie_word_embeddings": False,
        **({"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"} if tiled else {}),
        **({"image_grid_pinpoints": [pair[::-1] for pair in fields["image_grid_pinpoints"]]} if tiled else {}),
        "vit/tiny": fields["vision_config"],
    }, moved


def original_onevision(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """LLaVA-OneVision of its authors, whose tower's config counts a layer that the weights lack."""
    moved, tensors = original_llava(fields, tensors)
    tower = moved.pop("vit/tiny")
    return {
        **moved,
        "architectures": ["LlavaQwenForCausalLM"],
        "model_type": "llava",
        "image_aspect_ratio": fields["vision_aspect_ratio"],
        "mm_newline_position": "one_token",
        "vit/tiny": {**tower, "num_hidden_layers": tower["num_hidden_layers"] + 1},
    }, tensors


_INTERN_NAMES = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.patch_embeddings.projection": "vision_model.embeddings.patch_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def remote_intern(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    tower, renamed = fields["vision_config"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem, dot, suffix = name.rpartition(".")
        if "attention.k_proj" in name or "attention.v_proj" in name:
            continue
        if "attention.q_proj" in name:
            parts = [tensors[f"{stem.removesuffix('q_proj')}{part}_proj{dot}{suffix}"] for part in "qkv"]
            name, tensor = f"{stem.replace('attention.q_proj', 'attn.qkv')}{dot}{suffix}", torch.cat(parts)
        for theirs, own in _INTERN_NAMES.items():
            name = name.replace(theirs, own)
        renamed[name] = tensor.contiguous()
    vision = {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        **{key: tower[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        "image_size": 28,
        "patch_size": 7,
        "norm_type": tower["norm_type"],
        "qkv_bias": tower["attention_bias"],
        "qk_normalization": tower["use_qk_norm"],
        "layer_norm_eps": tower["layer_norm_eps"],
        "hidden_act": "gelu",
    }
    decoder = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[fields["text_config"]["model_type"]]
    text = {**fields["text_config"], "architectures": [decoder], "tie_word_embeddings": True}
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 28,
        "llm_config": text,
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": fields["vision_feature_layer"],
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_thumbnail": True,
        "vision_config": vision,
    }, renamed


def counted_from_the_start(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """Hidden states by number from the first, under the names that versions of transformers have for them."""
    count = fields["vision_config"]["num_hidden_layers"] + 1
    named = {key: fields.pop(key) for key in ("vision_feature_layer", "vision_feature_layers") if key in fields}
    for key, layers in named.items():
        if isinstance(layers, int):
            fields[key] = layers % count
        else:
            other = {"vision_feature_layer": "vision_feature_layers"}.get(key, "vision_feature_layer")
            fields[other] = [each % count for each in layers]
    return fields, tensors


def written_anew(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """Experts as transformers 5 writes them."""
    return fields, {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }


_TIMM = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "embeddings.position_embedding.weight": "pos_embed",
    "encoder.layers.": "blocks.",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.out_proj": "attn.proj",
    "self_attn.projection_layer": "attn.proj",
    "post_layernorm": "norm",
}
_SAM = {
    "patch_embed.projection": "patch_embed.proj",
    "layers.": "blocks.",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
}
_DRAWING = {
    "vqmodel": "gen_vision_model",
    "generation_embeddings": "gen_embed",
    "generation_aligner": "gen_aligner",
    "generation_head": "gen_head",
}
_NECK = {"conv1": "0", "layer_norm1": "1", "conv2": "2", "layer_norm2": "3"}


def _renamed(name: str, names: dict[str, str]) -> str:
    for theirs, own in names.items():
        name = name.replace(theirs, own)
    return name


def original_deepseek(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """DeepSeek-VL and Janus of their authors, by the names of transformers' conversion of them. Sizes of towers, which
    have a name there, are in an entry of ours."""
    two, renamed = "high_res_vision_config" in fields, dict[str, Tensor]()
    low = f"vision_model.vision_tower{'_low.vision_tower' if two else ''}"
    high = "vision_model.vision_tower_high.vision_tower"
    aligner = {"vision_proj": "low_up_proj", "high_res_vision_proj": "high_up_proj", "proj": "layers.1"}
    aligner |= {"linear1": "layers.0", "linear2": "layers.2", "fc1": "layers.0", "hidden_layers.0": "layers.2"}
    for whole, tensor in tensors.items():
        name = whole.removeprefix("model.")
        part, _, rest = name.partition(".")
        if part == "vision_model" and ".head." in name:
            name = f"{low}.attn_pool.{rest.rpartition('head.')[2]}"
        elif part == "vision_model":
            rest = rest.removeprefix("vision_model.")
            if "k_proj" in rest or "v_proj" in rest:
                continue
            if "q_proj" in rest:
                tensor = torch.cat([tensors[whole.replace("q_proj", f"{each}_proj")] for each in "qkv"])
                rest = rest.replace("self_attn.q_proj", "attn.qkv")
            tensor = tensor[None] if "position_embedding" in rest else tensor
            name = f"{low}.{_renamed(rest, _TIMM)}"
        elif part == "high_res_vision_model":
            rest = rest.removeprefix("vision_encoder.")
            name = f"{high}.{_renamed(rest, _NECK if rest.startswith('neck') else _SAM)}"
        elif part == "high_res_vision_neck":
            name = f"{high}.neck_hd.{_renamed(rest, _NECK)}"
        elif part == "high_res_vision_proj":
            name = f"{high}.downsamples.{_renamed(rest, {'conv1': '0', 'conv2': '1'})}"
        elif part == "high_res_vision_alpha":
            name = f"{high}.hd_alpha_downsamples"
        elif part in _DRAWING:
            name = f"{_DRAWING[part]}.{rest}"
        elif part == "aligner":
            stem, dot, suffix = rest.rpartition(".")
            name = f"aligner.{aligner[stem]}{dot}{suffix}"
        else:
            name = f"language_model.lm_head.{rest}" if part == "lm_head" else f"language_model.model.{rest}"
        renamed[name] = tensor.contiguous()
    siglip = {"model_name": "siglip_large_patch16_384", "image_size": 28, "select_layer": -1}
    params = {"low_res_cfg": siglip, "high_res_cfg": {"model_name": "sam_b_downsample", "image_size": 72}}
    if two:
        renamed["vision_model.high_layer_norm.weight"] = torch.ones(8)
    small = {key: value for key, value in fields["vision_config"].items() if key != "model_type"}
    if "mlp_ratio" in small:
        small["intermediate_size"] = int(small["hidden_size"] * small["mlp_ratio"])
    sizes = {"low": small, "high": fields.get("high_res_vision_config", {})}
    projector = "low_high_hybrid_split_mlp_gelu" if two else "mlp_gelu"
    return {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "torch_dtype": "float32",
        "aligner_config": {"cls": "MlpProjector", "params": {"depth": 2, "projector_type": projector}},
        "language_config": {**fields["text_config"], "tie_word_embeddings": True},
        **({"gen_vision_config": {"cls": "VQ-16", "model_type": "gen_vision"}} if "vq_config" in fields else {}),
        "vision_config": {
            "cls": "HybridVisionTower" if two else "CLIPVisionTower",
            "params": params if two else siglip,
            "sizes": sizes,
        },
    }, renamed


def whole_omni(name: str) -> Callable[[Fields, Tensors], tuple[Fields, Tensors]]:
    """A model that speaks too, with the one that thinks within it."""

    def change(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        moved = {f"thinker.{name.replace('model.visual.', 'visual.')}": tensor for name, tensor in tensors.items()}
        moved |= {f"{part}.weight": torch.zeros(2) for part in ("talker.model.norm", "token2wav.x", "code2wav.x")}
        thinker = {key: value for key, value in fields.items() if key not in ("architectures", "dtype")}
        whole = {"architectures": [name], "thinker_config": thinker, "talker_config": {"hidden_size": 3}}
        return {**whole, "torch_dtype": "float32"}, moved

    return change


def called(name: str) -> Callable[[Fields, Tensors], tuple[Fields, Tensors]]:
    """The same under another name."""
    return lambda fields, tensors: ({**fields, "architectures": [name]}, tensors)


def guessing_glm(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """A layer behind the others guesses further tokens."""
    fields["text_config"]["num_nextn_predict_layers"] = 1
    layer = {
        name.replace(".layers.1.", ".layers.2."): tensor + 1 for name, tensor in tensors.items() if ".layers.1." in name
    }
    return fields, {**tensors, **layer, "model.language_model.layers.2.eh_proj.weight": torch.zeros(32, 64)}


def guessing_exaone(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """The first files of EXAONE 4.5, and what guesses further tokens."""
    fields["text_config"]["model_type"] = "exaone4_5_text"
    return fields, {**tensors, "mtp.layers.0.mlp.up_proj.weight": torch.zeros(48, 32)}


def original_kimi(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    tower = fields["vision_config"]
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": fields["image_token_id"],
        "text_config": {**fields["text_config"], "model_type": "kimi_k2", "topk_method": "noaux_tc"},
        "torch_dtype": "float32",
        "vision_config": {
            **{f"vt_{name}": tower[name] for name in sizes},
            "init_pos_emb_height": tower["pos_emb_height"],
            "init_pos_emb_width": tower["pos_emb_width"],
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "patch_size": tower["patch_size"],
            "pos_emb_type": "divided_fixed",
            "projector_ln_eps": 1e-05,
        },
    }, tensors


LAYOUTS: list[tuple[str, Callable[[Fields, Tensors], tuple[Fields, Tensors]], str | None]] = [
    *((kind, flat, None) for kind in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm4v")),
    ("llava", moved_llava, None),
    ("llava", old_llava, None),
    ("lfm2_vl", old_llava, None),
    *((kind, counted_from_the_start, None) for kind in ("llava", "vip_llava", "pixtral", "aya_vision")),
    ("llava", original_llava, "LlavaLlamaForCausalLM"),
    ("llava_next", original_llava, "LlavaMistralForCausalLM"),
    ("onevision", original_onevision, "LlavaQwenForCausalLM"),
    ("qwen3_vl_moe", written_anew, None),
    ("internvl", remote_intern, "InternVLChatModel"),
    ("internvl_6b", remote_intern, "InternVLChatModel"),
    ("internvl_6b", called("InternS1ForConditionalGeneration"), "InternS1ForConditionalGeneration"),
    ("lighton_ocr", called("LightOnOCRForConditionalGeneration"), "LightOnOCRForConditionalGeneration"),
    ("exaone4_5", guessing_exaone, None),
    ("kimi_k25", original_kimi, "KimiK25ForConditionalGeneration"),
    ("glm_ocr", guessing_glm, None),
    ("qwen2_5_omni", whole_omni("Qwen2_5OmniModel"), "Qwen2_5OmniModel"),
    ("qwen2_5_omni", called("Qwen2_5OmniForConditionalGeneration"), "Qwen2_5OmniForConditionalGeneration"),
    ("qwen3_omni", whole_omni("Qwen3OmniMoeForConditionalGeneration"), "Qwen3OmniMoeForConditionalGeneration"),
    ("deepseek_vl", original_deepseek, "MultiModalityCausalLM"),
    ("deepseek_vl_hybrid", original_deepseek, "MultiModalityCausalLM"),
    ("janus", original_deepseek, "MultiModalityCausalLM"),
]
"""Kind, what config.json and the tensors become, and the class that the file names, if it is another."""


def classes_of(kind: str) -> list[str]:
    """Return the classes under which a kind is held to its oracle besides its own."""
    return list(dict.fromkeys(name for own, _, name in LAYOUTS if own == kind and name is not None))
