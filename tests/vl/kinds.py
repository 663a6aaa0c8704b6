"""What the tiny vision-language checkpoints are: by kind config, settings of images, tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.checkpoints import SPECIAL_TOKENS

__all__ = ["CLIP", "IMAGE_ID", "KINDS", "TEXT"]

IMAGE_ID = len(SPECIAL_TOKENS)
"""Of the first special token behind the usual ones."""

TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 16,
}
_CLIP_PICTURES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def _llava() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import LlavaConfig

    text = {**TEXT, "model_type": "llama"}
    config = LlavaConfig(vision_config=CLIP, text_config=text, image_token_index=IMAGE_ID, image_seq_length=16)
    return config, _CLIP_PICTURES, ["<image>"], _PARTS_TEMPLATE


def _llava_next() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import LlavaNextConfig

    pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    config = LlavaNextConfig(
        vision_config=CLIP,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE_ID,
        image_grid_pinpoints=pinpoints,
    )
    pictures = {
        **_CLIP_PICTURES,
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": pinpoints,
        "do_pad": True,
    }
    return config, pictures, ["<image>"], None


_QWEN_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 8 * 8,
    "max_pixels": 8 * 8 * 60,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": _CLIP_PICTURES["image_mean"],
    "image_std": _CLIP_PICTURES["image_std"],
}
_QWENTEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}}
_QWEN_TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]


def _qwen2_vl() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Qwen2VLConfig

    tower = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    ids = {"image_token_id": IMAGE_ID, "vision_start_token_id": IMAGE_ID + 1, "vision_end_token_id": IMAGE_ID + 2}
    config = Qwen2VLConfig(vision_config=tower, text_config=_QWENTEXT, **ids, video_token_id=IMAGE_ID + 3)
    return config, _QWEN_PICTURES, _QWEN_TOKENS, None


def _qwen2_5_vl() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Qwen2_5_VLConfig

    tower = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "out_hidden_size": 32,
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    ids = {"image_token_id": IMAGE_ID, "vision_start_token_id": IMAGE_ID + 1, "vision_end_token_id": IMAGE_ID + 2}
    config = Qwen2_5_VLConfig(vision_config=tower, text_config=_QWENTEXT, **ids, video_token_id=IMAGE_ID + 3)
    pictures = {**_QWEN_PICTURES, "min_pixels": 8 * 8 * 2}
    return config, pictures, _QWEN_TOKENS, None


def _qwen3_vl() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(**_qwen3_fields({**TEXT, "num_hidden_layers": 4})), _QWEN3_PICTURES, _QWEN_TOKENS, None


def _qwen3_vl_moe() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Qwen3VLMoeConfig

    text = {**TEXT, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3VLMoeConfig(**_qwen3_fields(text)), _QWEN3_PICTURES, _QWEN_TOKENS, None


def _qwen3_5() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Qwen3_5Config

    return Qwen3_5Config(**_qwen3_5_fields({"intermediate_size": 48})), _QWEN3_PICTURES, _QWEN_TOKENS, None


def _qwen3_5_moe() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Qwen3_5MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text = {**experts, "shared_expert_intermediate_size": 24}
    return Qwen3_5MoeConfig(**_qwen3_5_fields(text)), _QWEN3_PICTURES, _QWEN_TOKENS, None


def _qwen3_5_fields(text: dict[str, Any]) -> dict[str, Any]:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    common = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    own = {"linear_value_head_dim": 8, "rms_norm_eps": 0.1, "partial_rotary_factor": 0.5}
    fields = _qwen3_fields({**common, **delta, **kinds, **own, **text})
    fields["vision_config"].pop("deepstack_visual_indexes")
    fields["text_config"]["rope_parameters"] = {**rope, "partial_rotary_factor": 0.5}
    return fields


_QWEN3_PICTURES = {**_QWEN_PICTURES, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def _qwen3_fields(text: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
    return {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 44,
            "out_hidden_size": 32,
            "depth": 4,
            "num_heads": 2,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        "text_config": {**text, "rope_parameters": rope},
        "image_token_id": IMAGE_ID,
        "vision_start_token_id": IMAGE_ID + 1,
        "vision_end_token_id": IMAGE_ID + 2,
        "video_token_id": IMAGE_ID + 3,
    }


def _glm4v() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Glm4vConfig

    tower = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "out_hidden_size": 32,
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 20,
    }
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = Glm4vConfig(
        vision_config=tower,
        text_config={**text, "rope_parameters": rope},
        image_token_id=IMAGE_ID,
        image_start_token_id=IMAGE_ID + 1,
        image_end_token_id=IMAGE_ID + 2,
        video_token_id=319,
        video_start_token_id=318,
        video_end_token_id=317,
    )
    pictures = {key: value for key, value in _QWEN_PICTURES.items() if not key.endswith("_pixels")}
    pictures |= {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 2 * 40},
    }
    return config, pictures, ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>"], None


def _glm46v() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Glm46VConfig

    config, pictures, tokens, template = _glm4v()
    fields = {key: each for key, each in config.to_dict().items() if key != "model_type"}
    return Glm46VConfig(**fields), {**pictures, "image_processor_type": "Glm46VImageProcessor"}, tokens, template


def _glm4v_moe() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Glm4vMoeConfig

    config, pictures, tokens, template = _glm4v()
    fields = {key: each for key, each in config.to_dict().items() if key != "model_type"}
    text = {key: each for key, each in fields["text_config"].items() if key != "model_type"} | {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    }
    tower = {key: each for key, each in fields["vision_config"].items() if key != "model_type"}
    return Glm4vMoeConfig(**{**fields, "text_config": text, "vision_config": tower}), pictures, tokens, template


_INTERN_TOKENS = ["<IMG_CONTEXT>", "<img>", "</img>"]


def _internvl() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import InternVLConfig

    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [28, 28],
        "patch_size": [7, 7],
        "attention_bias": True,
    }
    text = {**TEXT, "model_type": "qwen2"}
    config = InternVLConfig(vision_config=tower, text_config=text, image_token_id=IMAGE_ID, image_seq_length=4)
    pictures = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 28, "width": 28},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 6,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    return config, pictures, _INTERN_TOKENS, None


def _aya_vision() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import AyaVisionConfig

    tower = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = {**TEXT, "model_type": "cohere2", "sliding_window": 24}
    config = AyaVisionConfig(vision_config=tower, text_config=text, image_token_index=IMAGE_ID)
    config.alignment_intermediate_size = 56
    return config, _internvl()[1], ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"], None


def _internvl_6b() -> tuple[Any, dict[str, Any], list[str], str | None]:
    """The larger tower's norms and biases, and InternVL3.5's decoder."""
    from transformers import Qwen3Config

    config, pictures, tokens, template = _internvl()
    config.text_config = Qwen3Config(**TEXT)
    tower = config.vision_config
    tower.attention_bias, tower.use_qk_norm, tower.norm_type = False, True, "rms_norm"
    config.vision_feature_layer = -2
    return config, pictures, tokens, template


def _gemma3() -> tuple[Any, dict[str, Any], list[str], str | None]:
    """Windows that are shorter than an image, so that they bound what its tokens see."""
    from transformers import Gemma3Config

    tower = {**CLIP, "model_type": "siglip_vision_model"}
    del tower["projection_dim"]
    text = {
        **TEXT,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
    }
    config = Gemma3Config(
        vision_config={**tower, "image_size": 56},
        text_config=text,
        mm_tokens_per_image=16,
        image_token_index=IMAGE_ID,
        boi_token_index=IMAGE_ID + 1,
        eoi_token_index=IMAGE_ID + 2,
    )
    pictures = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return config, pictures, _GEMMA_TOKENS, None


def _gemma3_scan() -> tuple[Any, dict[str, Any], list[str], str | None]:
    """Long images come with crops of them."""
    config, pictures, tokens, template = _gemma3()
    scan = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    return config, {**pictures, **scan}, tokens, template


_GEMMA_TOKENS = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]


def _onevision() -> tuple[Any, dict[str, Any], list[str], str | None]:
    """So few patches of all tiles that those of large images are shrunk."""
    from transformers import LlavaOnevisionConfig

    tower = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
    del tower["projection_dim"]
    pinpoints = [[28 * rows, 28 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    config = LlavaOnevisionConfig(
        vision_config=tower,
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_index=IMAGE_ID,
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_2",
        video_token_index=IMAGE_ID + 1,
    )
    pictures = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 28, "width": 28},
        "image_grid_pinpoints": pinpoints,
        "image_mean": _CLIP_PICTURES["image_mean"],
        "image_std": _CLIP_PICTURES["image_std"],
        "resample": 3,
        "do_pad": True,
    }
    return config, pictures, ["<image>", "<video>"], None


_PIXTRAL_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 7,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
_PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_PIXTRAL_PICTURES = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 60},
    "patch_size": {"height": 7, "width": 7},
    "image_mean": _CLIP_PICTURES["image_mean"],
    "image_std": _CLIP_PICTURES["image_std"],
}


def _pixtral() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import LlavaConfig

    config = LlavaConfig(
        vision_config=_PIXTRAL_TOWER,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, _PIXTRAL_PICTURES, _PIXTRAL_TOKENS, None


def _mistral3() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Mistral3Config

    config = Mistral3Config(
        vision_config=_PIXTRAL_TOWER,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE_ID,
    )
    return config, {**_PIXTRAL_PICTURES, "patch_size": {"height": 14, "width": 14}}, _PIXTRAL_TOKENS, None


def _lighton_ocr() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import LightOnOcrConfig

    config = LightOnOcrConfig(
        vision_config={**_PIXTRAL_TOWER, "hidden_act": "silu"},
        text_config={**TEXT, "model_type": "qwen3"},
        image_token_id=IMAGE_ID,
        tie_word_embeddings=True,
    )
    return config, {**_PIXTRAL_PICTURES, "patch_size": {"height": 14, "width": 14}}, ["<|image_pad|>"], None


def _idefics3() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import Idefics3Config

    return Idefics3Config(**_idefics3_fields()), _IDEFICS3_PICTURES, _IDEFICS3_TOKENS, None


def _smolvlm() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import SmolVLMConfig

    pictures = {**_IDEFICS3_PICTURES, "image_processor_type": "SmolVLMImageProcessor"}
    return SmolVLMConfig(**_idefics3_fields()), pictures, _IDEFICS3_TOKENS, None


_IDEFICS3_TOKENS = [
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]
_IDEFICS3_PICTURES = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 84},
    "max_image_size": {"longest_edge": 42},
    "resample": 1,
    "do_image_splitting": True,
    "do_pad": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _idefics3_fields() -> dict[str, Any]:
    tower = {key: value for key, value in CLIP.items() if key not in ("model_type", "projection_dim")}
    return {
        "vision_config": {**tower, "image_size": 42},
        "text_config": {**TEXT, "model_type": "llama"},
        "image_token_id": IMAGE_ID,
        "scale_factor": 2,
    }


def _deepseek_vl() -> tuple[Any, dict[str, Any], list[str], str | None]:
    from transformers import DeepseekVLConfig

    tower = {**CLIP, "model_type": "siglip_vision_model"}
    del tower["projection_dim"]
    config = DeepseekVLConfig(vision_config=tower, text_config={**TEXT, "model_type": "llama"}, image_token_id=IMAGE_ID)
    pictures = {
        "image_processor_type": "DeepseekVLImageProcessor",
        "size": {"height": 28, "width": 28},
        "min_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return config, pictures, ["<image_placeholder>"], None


def _deepseek_vl_hybrid() -> tuple[Any, dict[str, Any], list[str], str | None]:
    """Windows that do not divide the larger tower's patches, whose features are stretched."""
    from transformers import DeepseekVLHybridConfig

    tower = {**CLIP, "model_type": "siglip_vision_model"}
    del tower["projection_dim"]
    large = {
        "model_type": "sam_vision_model",
        "hidden_size": 24,
        "mlp_dim": 40,
        "output_channels": 6,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 72,
        "patch_size": 8,
        "window_size": 4,
        "global_attn_indexes": [1, 3],
    }
    config = DeepseekVLHybridConfig(
        vision_config=tower,
        high_res_vision_config=large,
        text_config={**TEXT, "model_type": "llama"},
        image_token_id=IMAGE_ID,
    )
    pictures = {
        "image_processor_type": "DeepseekVLHybridImageProcessor",
        "size": {"height": 28, "width": 28},
        "high_res_size": {"height": 72, "width": 72},
        "min_size": 14,
        "high_res_resample": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "high_res_image_mean": [0.5, 0.4, 0.6],
        "high_res_image_std": [0.5, 0.4, 0.3],
    }
    return config, pictures, ["<image_placeholder>"], None


def _llama4() -> tuple[Any, dict[str, Any], list[str], str | None]:
    """Chunks of attention that are shorter than an image; experts in every other layer."""
    from transformers import Llama4Config

    tower = {
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
        "vision_output_dim": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    text = {
        **TEXT,
        "intermediate_size_mlp": 56,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 32,
        "floor_scale": 7,
        "attn_scale": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    config = Llama4Config(
        vision_config=tower,
        text_config=text,
        image_token_index=IMAGE_ID,
        boi_token_index=IMAGE_ID + 1,
        eoi_token_index=IMAGE_ID + 2,
    )
    return config, _LLAMA4_PICTURES, _LLAMA4_TOKENS, None


_LLAMA4_TOKENS = [
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
]
_LLAMA4_PICTURES = {
    "image_processor_type": "Llama4ImageProcessor",
    "size": {"height": 28, "width": 28},
    "max_patches": 6,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.3],
}


KINDS: dict[str, Callable[[], tuple[Any, dict[str, Any], list[str], str | None]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "onevision": _onevision,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "lighton_ocr": _lighton_ocr,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "glm4v_moe": _glm4v_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": _deepseek_vl_hybrid,
    "gemma3": _gemma3,
    "gemma3_scan": _gemma3_scan,
    "aya_vision": _aya_vision,
    "internvl": _internvl,
    "internvl_6b": _internvl_6b,
    "llama4": _llama4,
}
"""Config, preprocessor_config.json, special tokens and chat template of each."""
