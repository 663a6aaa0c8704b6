"""Kinds of tiny checkpoints whose towers take images of any size as patches."""

from __future__ import annotations

from typing import Any

from tests.vl.tiny_parts import CLIP_PICTURES, IMAGE_ID, TEXT, Kind

__all__ = ["NATIVE_KINDS"]

_QWEN_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 8 * 8,
    "max_pixels": 8 * 8 * 60,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": CLIP_PICTURES["image_mean"],
    "image_std": CLIP_PICTURES["image_std"],
}
_QWENTEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}}
_QWEN_TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]


def _qwen2_vl() -> Kind:
    from transformers import Qwen2VLConfig

    tower = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    ids = {"image_token_id": IMAGE_ID, "vision_start_token_id": IMAGE_ID + 1, "vision_end_token_id": IMAGE_ID + 2}
    config = Qwen2VLConfig(vision_config=tower, text_config=_QWENTEXT, **ids, video_token_id=IMAGE_ID + 3)
    return config, _QWEN_PICTURES, _QWEN_TOKENS, None


def _qwen2_5_vl() -> Kind:
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


def _exaone4_5() -> Kind:
    """Heads of keys that two of queries share, and a window of the decoder that is shorter than an image."""
    from transformers import Exaone4_5_Config

    usual, pictures, _, _ = _qwen2_5_vl()
    tower = {key: each for key, each in usual.vision_config.to_dict().items() if key != "model_type"}
    text = {**TEXT, "model_type": "exaone4", "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 2}
    config = Exaone4_5_Config(
        vision_config={**tower, "num_heads": 4, "num_key_value_heads": 2},
        text_config=text,
        image_token_id=IMAGE_ID,
        video_token_id=319,
    )
    return config, pictures, ["<|image_pad|>", "<vision>", "</vision>"], None


def _qwen3_vl() -> Kind:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(**_qwen3_fields({**TEXT, "num_hidden_layers": 4})), _QWEN3_PICTURES, _QWEN_TOKENS, None


def _qwen3_vl_moe() -> Kind:
    from transformers import Qwen3VLMoeConfig

    text = {**TEXT, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3VLMoeConfig(**_qwen3_fields(text)), _QWEN3_PICTURES, _QWEN_TOKENS, None


_HEARS = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_mel_bins": 8,
    "output_dim": 32,
    "max_source_positions": 20,
}
"""The smallest part for sounds, which is left out."""


def _qwen2_5_omni() -> Kind:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    usual, pictures, _, _ = _qwen2_5_vl()
    tower = {key: each for key, each in usual.vision_config.to_dict().items() if key != "model_type"}
    config = Qwen2_5OmniThinkerConfig(
        vision_config=tower, text_config=_QWENTEXT, audio_config=_HEARS, image_token_index=IMAGE_ID
    )
    config.vision_start_token_id, config.vision_end_token_id = IMAGE_ID + 1, IMAGE_ID + 2
    return config, pictures, ["<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>"], None


def _qwen3_omni() -> Kind:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    usual, pictures, _, _ = _qwen3_vl_moe()
    text, tower = (
        {key: each for key, each in part.to_dict().items() if key != "model_type"}
        for part in (usual.text_config, usual.vision_config)
    )
    config = Qwen3OmniMoeThinkerConfig(
        vision_config=tower,
        text_config={**text, "num_experts": 4},
        audio_config={**_HEARS, "downsample_hidden_size": 8},
    )
    config.image_token_id, config.vision_start_token_id = IMAGE_ID, IMAGE_ID + 1
    config.video_token_id, config.audio_token_id = 318, 319
    return config, pictures, _QWEN_TOKENS, None


def _qwen3_5() -> Kind:
    from transformers import Qwen3_5Config

    return Qwen3_5Config(**_qwen3_5_fields({"intermediate_size": 48})), _QWEN3_PICTURES, _QWEN_TOKENS, None


def _qwen3_5_moe() -> Kind:
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


def _glm4v() -> Kind:
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


def _glm46v() -> Kind:
    from transformers import Glm46VConfig

    config, pictures, tokens, template = _glm4v()
    fields = {key: each for key, each in config.to_dict().items() if key != "model_type"}
    return Glm46VConfig(**fields), {**pictures, "image_processor_type": "Glm46VImageProcessor"}, tokens, template


def _glm4v_moe() -> Kind:
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


def _glm_ocr() -> Kind:
    from transformers import GlmOcrConfig

    config, pictures, tokens, template = _glm4v()
    fields = {key: each for key, each in config.to_dict().items() if key != "model_type"}
    text, tower = (
        {key: each for key, each in fields[part].items() if key != "model_type"}
        for part in ("text_config", "vision_config")
    )
    # Heads that are no share of the width, as its own are.
    text |= {"head_dim": 24, "rope_parameters": {**text["rope_parameters"], "mrope_section": [1, 2, 3]}}
    tower |= {"attention_bias": True}
    return (
        GlmOcrConfig(**{**fields, "text_config": text, "vision_config": tower}),
        {**pictures, "image_processor_type": "Glm46VImageProcessor"},
        tokens,
        template,
    )


def _paddleocr_vl() -> Kind:
    from transformers import PaddleOCRVLConfig

    tower = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 20,
    }
    config = PaddleOCRVLConfig(
        vision_config=tower,
        text_config=_QWENTEXT,
        image_token_id=IMAGE_ID,
        vision_start_token_id=IMAGE_ID + 1,
        vision_end_token_id=IMAGE_ID + 2,
        video_token_id=319,
    )
    pictures = {**_QWEN_PICTURES, "image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}
    return config, pictures, ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"], None


def _lfm2_vl() -> Kind:
    """Pictures of other sizes than the learned positions are for, and tiles of larger ones."""
    from transformers import Lfm2VlConfig

    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "num_patches": 25,
        "vision_use_head": False,
    }
    text = {**TEXT, "model_type": "lfm2", "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
    text |= {"layer_types": ["conv", "full_attention", "conv"], "rope_parameters": {"rope_theta": 500.0}}
    config = Lfm2VlConfig(
        vision_config={**tower, "model_type": "siglip2_vision_model"},
        text_config={key: each for key, each in text.items() if key != "head_dim"},
        image_token_id=IMAGE_ID,
        projector_hidden_size=40,
    )
    pictures = {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": 4,
        "tile_size": 32,
        "min_tiles": 2,
        "max_tiles": 4,
        "min_image_tokens": 4,
        "max_image_tokens": 12,
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.3],
    }
    shapes = [(row, column) for row in range(1, 5) for column in range(1, 5)]
    names = [f"<|img_row_{row}_col_{column}|>" for row, column in shapes]
    return config, pictures, ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *names], None


def _kimi_k25() -> Kind:
    """Images that are larger than allowed, and narrow ones that are longer."""
    from transformers import Kimi_K25Config

    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
    }
    text = {
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "model_type": "deepseek_v3",
        "num_key_value_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    }
    config = Kimi_K25Config(
        vision_config=tower,
        text_config=text,
        projection_hidden_size=24,
        image_token_id=IMAGE_ID,
        video_token_id=319,
        vision_start_token_id=IMAGE_ID + 1,
        vision_end_token_id=IMAGE_ID + 3,
        tie_word_embeddings=False,
    )
    pictures = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "patch_size": 4,
        "max_patches": 60,
        "size": {"max_height": 12, "max_width": 12},
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.3],
    }
    return config, pictures, ["<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"], None


NATIVE_KINDS = {
    "kimi_k25": _kimi_k25,
    "lfm2_vl": _lfm2_vl,
    "paddleocr_vl": _paddleocr_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "exaone4_5": _exaone4_5,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni": _qwen3_omni,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": _glm_ocr,
}
"""Of each, what makes it."""
