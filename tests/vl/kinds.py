"""What the tiny vision-language checkpoints are: by kind config, settings of images, tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vl.native_kinds import NATIVE_KINDS
from tests.vl.tiny_parts import CLIP, CLIP_PICTURES, IMAGE_ID, PARTS_TEMPLATE, TEXT, Kind

__all__ = ["KINDS"]


def _llava() -> Kind:
    from transformers import LlavaConfig

    text = {**TEXT, "model_type": "llama"}
    config = LlavaConfig(vision_config=CLIP, text_config=text, image_token_index=IMAGE_ID, image_seq_length=16)
    return config, CLIP_PICTURES, ["<image>"], PARTS_TEMPLATE


def _llava_next() -> Kind:
    from transformers import LlavaNextConfig

    pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    config = LlavaNextConfig(
        vision_config=CLIP,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE_ID,
        image_grid_pinpoints=pinpoints,
    )
    pictures = {
        **CLIP_PICTURES,
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": pinpoints,
        "do_pad": True,
    }
    return config, pictures, ["<image>"], None


def _llava_next_video() -> Kind:
    from transformers import LlavaNextVideoConfig

    config, pictures, tokens, template = _llava_next()
    fields = {key: each for key, each in config.to_dict().items() if key not in ("model_type", "architectures")}
    return LlavaNextVideoConfig(**fields, video_token_index=IMAGE_ID + 1), pictures, [*tokens, "<video>"], template


def _granite_vision() -> Kind:
    """LLaVA-NeXT whose tower is SigLIP, several layers of which are read, and whose decoder multiplies what it reads.
    Its logits are not divided, as the oracle of late leaves that out."""
    config, pictures, tokens, template = _llava_next()
    tower = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
    del tower["projection_dim"]
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
    text = {**TEXT, **scales, "model_type": "granite", "logits_scaling": 1.0, "tie_word_embeddings": True}
    del text["head_dim"]
    changed = {
        "vision_config": tower,
        "text_config": text,
        "vision_feature_layer": [-3, -1],
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    }
    return type(config)(**{**config.to_dict(), **changed}), pictures, tokens, template


_INTERN_TOKENS = ["<IMG_CONTEXT>", "<img>", "</img>"]


def _internvl() -> Kind:
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


def _aya_vision() -> Kind:
    from transformers import AyaVisionConfig

    tower = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = {**TEXT, "model_type": "cohere2", "sliding_window": 24}
    config = AyaVisionConfig(vision_config=tower, text_config=text, image_token_index=IMAGE_ID)
    config.alignment_intermediate_size = 56
    return config, _internvl()[1], ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"], None


def _cohere2_vision() -> Kind:
    from transformers import Cohere2VisionConfig

    tower = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = {**TEXT, "model_type": "cohere2", "sliding_window": 24}
    config = Cohere2VisionConfig(
        vision_config=tower, text_config=text, image_token_id=IMAGE_ID, alignment_intermediate_size=56
    )
    pictures = {**_internvl()[1], "image_processor_type": "Cohere2VisionImageProcessor", "crop_to_patches": True}
    tokens = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"]
    return config, pictures, tokens, None


def _got_ocr2() -> Kind:
    from transformers import GotOcr2Config

    tower = {
        "hidden_size": 24,
        "mlp_dim": 40,
        "output_channels": 6,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
        "window_size": 3,
        "global_attn_indexes": [1],
    }
    text = {**TEXT, "model_type": "qwen2"}
    config = GotOcr2Config(vision_config=tower, text_config=text, image_token_index=IMAGE_ID, image_seq_length=4)
    pictures = {**_internvl()[1], "size": {"height": 64, "width": 64}, "crop_to_patches": False}
    return config, pictures, ["<imgpad>", "<img>", "</img>"], None


def _ovis2() -> Kind:
    from transformers import Ovis2Config

    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "vocab_size": 21,
        "hidden_stride": 2,
    }
    text = {**TEXT, "model_type": "qwen2"}
    config = Ovis2Config(
        vision_config=tower,
        text_config={key: each for key, each in text.items() if key != "head_dim"},
        image_token_id=IMAGE_ID,
        visual_indicator_token_ids=[IMAGE_ID + number for number in range(1, 6)],
        hidden_size=TEXT["hidden_size"],
        vocab_size=TEXT["vocab_size"],
    )
    pictures = {
        **CLIP_PICTURES,
        "image_processor_type": "Ovis2ImageProcessor",
        "size": {"height": 28, "width": 28},
        "crop_to_patches": True,
        "max_patches": 6,
        "do_center_crop": False,
    }
    del pictures["crop_size"]
    return config, pictures, ["<IMG_ATOM>", *(f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END"))], None


def _internvl_6b() -> Kind:
    """The larger tower's norms and biases, and InternVL3.5's decoder."""
    from transformers import Qwen3Config

    config, pictures, tokens, template = _internvl()
    config.text_config = Qwen3Config(**TEXT)
    tower = config.vision_config
    tower.attention_bias, tower.use_qk_norm, tower.norm_type = False, True, "rms_norm"
    config.vision_feature_layer = -2
    return config, pictures, tokens, template


def _gemma3() -> Kind:
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


def _gemma3_scan() -> Kind:
    """Long images come with crops of them."""
    config, pictures, tokens, template = _gemma3()
    scan = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    return config, {**pictures, **scan}, tokens, template


def _gemma4() -> Kind:
    """Bounded products, inputs of layers, and keys and values that layers share."""
    from transformers import Gemma4Config

    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 300,
        "use_clipped_linears": True,
    }
    text = {
        **TEXT,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 24,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "pad_token_id": 2,
    }
    config = Gemma4Config(
        vision_config=tower,
        text_config=text,
        audio_config=None,
        image_token_id=IMAGE_ID,
        boi_token_id=IMAGE_ID + 1,
        eoi_token_id=IMAGE_ID + 2,
        video_token_id=319,
        audio_token_id=318,
    )
    pictures = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 16,
        "do_normalize": False,
    }
    return config, pictures, ["<|image|>", "<|image>", "<image|>"], None


def _gemma4_vision() -> Kind:
    """Images whose tokens see each other within windows that are shorter than they, and standardized features."""
    config, pictures, tokens, template = _gemma4()
    config.text_config.use_bidirectional_attention = "vision"
    config.text_config.hidden_size_per_layer_input = config.text_config.num_kv_shared_layers = 0
    config.vision_config.use_clipped_linears, config.vision_config.standardize = False, True
    return config, pictures, tokens, template


_GEMMA_TOKENS = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]


def _onevision() -> Kind:
    """So few patches of all tiles that those of large images are shrunk, and pixels that belong to no patch."""
    from transformers import LlavaOnevisionConfig

    tower = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 30}
    del tower["projection_dim"]
    pinpoints = [[30 * rows, 30 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
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
        "size": {"height": 30, "width": 30},
        "image_grid_pinpoints": pinpoints,
        "image_mean": CLIP_PICTURES["image_mean"],
        "image_std": CLIP_PICTURES["image_std"],
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
    "image_mean": CLIP_PICTURES["image_mean"],
    "image_std": CLIP_PICTURES["image_std"],
}


def _pixtral() -> Kind:
    from transformers import LlavaConfig

    config = LlavaConfig(
        vision_config=_PIXTRAL_TOWER,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, _PIXTRAL_PICTURES, _PIXTRAL_TOKENS, None


def _mistral3() -> Kind:
    from transformers import Mistral3Config

    config = Mistral3Config(
        vision_config=_PIXTRAL_TOWER,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE_ID,
    )
    return config, {**_PIXTRAL_PICTURES, "patch_size": {"height": 14, "width": 14}}, _PIXTRAL_TOKENS, None


def _lighton_ocr() -> Kind:
    from transformers import LightOnOcrConfig

    config = LightOnOcrConfig(
        vision_config={**_PIXTRAL_TOWER, "hidden_act": "silu"},
        text_config={**TEXT, "model_type": "qwen3"},
        image_token_id=IMAGE_ID,
        tie_word_embeddings=True,
    )
    return config, {**_PIXTRAL_PICTURES, "patch_size": {"height": 14, "width": 14}}, ["<|image_pad|>"], None


def _idefics3() -> Kind:
    from transformers import Idefics3Config

    return Idefics3Config(**_idefics3_fields()), _IDEFICS3_PICTURES, _IDEFICS3_TOKENS, None


def _smolvlm() -> Kind:
    from transformers import SmolVLMConfig

    pictures = {**_IDEFICS3_PICTURES, "image_processor_type": "SmolVLMImageProcessor"}
    return SmolVLMConfig(**_idefics3_fields()), pictures, _IDEFICS3_TOKENS, None


_IDEFICS3_TOKENS = [
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]
_IDEFICS3_PICTURES = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 88},
    "max_image_size": {"longest_edge": 44},
    "resample": 1,
    "do_image_splitting": True,
    "do_pad": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _idefics3_fields() -> dict[str, Any]:
    tower = {key: value for key, value in CLIP.items() if key not in ("model_type", "projection_dim")}
    return {
        "vision_config": {**tower, "image_size": 44},
        "text_config": {**TEXT, "model_type": "llama"},
        "image_token_id": IMAGE_ID,
        "scale_factor": 2,
    }


def _deepseek_vl() -> Kind:
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


def _janus() -> Kind:
    from transformers import JanusConfig

    tower = {
        "hidden_size": 24,
        "mlp_ratio": 2.5,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "projection_dim": 32,
    }
    drawing = {
        "base_channels": 32,
        "channel_multiplier": [1],
        "embed_dim": 4,
        "image_token_embed_dim": 32,
        "latent_channels": 32,
        "num_embeddings": 6,
        "num_res_blocks": 1,
        "projection_dim": 8,
    }
    text = {**TEXT, "model_type": "llama"}
    config = JanusConfig(vision_config=tower, vq_config=drawing, text_config=text, image_token_id=IMAGE_ID)
    _, pictures, tokens, template = _deepseek_vl()
    pictures = {**pictures, "image_processor_type": "JanusImageProcessor"}
    return config, pictures, [*tokens, "<begin_of_image>", "<end_of_image>"], template


def _vip_llava() -> Kind:
    """Hidden states of several layers, counted from the beginning and from the end: those of published models, which
    transformers has where nothing is said, under a name of the entry that differs between its versions."""
    from transformers import VipLlavaConfig

    config = VipLlavaConfig(
        vision_config={**CLIP, "num_hidden_layers": 10},
        text_config={**TEXT, "model_type": "llama"},
        image_token_index=IMAGE_ID,
        image_seq_length=16,
        projector_layernorm_eps=0.1,
    )
    return config, CLIP_PICTURES, ["<image>"], PARTS_TEMPLATE


def _deepseek_vl_hybrid() -> Kind:
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


def _llama4() -> Kind:
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


KINDS: dict[str, Callable[[], Kind]] = {
    **NATIVE_KINDS,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next_video,
    "granite_vision": _granite_vision,
    "onevision": _onevision,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "lighton_ocr": _lighton_ocr,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": _deepseek_vl_hybrid,
    "janus": _janus,
    "vip_llava": _vip_llava,
    "gemma3": _gemma3,
    "gemma3_scan": _gemma3_scan,
    "gemma4": _gemma4,
    "gemma4_vision": _gemma4_vision,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "got_ocr2": _got_ocr2,
    "ovis2": _ovis2,
    "internvl": _internvl,
    "internvl_6b": _internvl_6b,
    "llama4": _llama4,
}
"""Config, preprocessor_config.json, special tokens and chat template of each."""
