"""Shapes of vision-language models for shapes.py: their towers' tensors, in transformers' layout, and what else their
folders hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["VISION_SHAPES", "companions", "tower_tensors", "with_token_ids"]

_TEXT = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}

VISION_SHAPES: dict[str, dict[str, Any]] = {
    "internvl2-8b": {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": {
            **_TEXT,
            # InternLM2.5-7B's decoder is Llama's with other names.
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 92553,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
        },
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": [448, 448],
            "patch_size": [14, 14],
            "attention_bias": True,
            "hidden_act": "gelu",
        },
        "downsample_ratio": 0.5,
    },
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": {
            **_TEXT,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "depth": 32,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
        },
    },
}

_TOKENS = {
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
}
"""Of the tokenizer's end, the one that stands for an image first."""

_PICTURES: dict[str, dict[str, Any]] = {
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 448, "width": 448},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 16384,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
}

Tensor = tuple[str, tuple[int, ...], bool]
"""Name, shape, and whether its numbers are ones."""


def companions(config: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the tokens that a model with a tower has besides, and its preprocessor_config.json."""
    return _TOKENS[config["model_type"]], _PICTURES[config["model_type"]]


def with_token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's fields with the ids of these tokens, which are the vocabulary's last."""
    tokens = _TOKENS[config["model_type"]]
    first = config["text_config"]["vocab_size"] - len(tokens)
    videos = {"video_token_id": first + tokens.index("<|video_pad|>")} if "<|video_pad|>" in tokens else {}
    return {**config, "image_token_id": first, **videos}


def tower_tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor of the tower and what joins it to the decoder. Raises ValueError for a class not known here."""
    towers = {"internvl": _intern, "qwen2_5_vl": _qwen}
    if config["model_type"] not in towers:
        raise ValueError(f"{config['model_type']}: only towers of InternVL and Qwen2.5-VL can be written")
    yield from towers[config["model_type"]](config["vision_config"], config["text_config"]["hidden_size"])


def _dense(name: str, out_features: int, *window: int) -> Iterator[Tensor]:
    yield f"{name}.weight", (out_features, *window), False
    yield f"{name}.bias", (out_features,), False


def _intern(vision: dict[str, Any], width: int) -> Iterator[Tensor]:
    size, inner = vision["hidden_size"], vision["intermediate_size"]
    patch, side = vision["patch_size"][0], vision["image_size"][0] // vision["patch_size"][0]
    yield "vision_tower.embeddings.cls_token", (1, 1, size), False
    yield "vision_tower.embeddings.position_embeddings", (1, side * side + 1, size), False
    yield from _dense("vision_tower.embeddings.patch_embeddings.projection", size, 3, patch, patch)
    for number in range(vision["num_hidden_layers"]):
        layer = f"vision_tower.encoder.layer.{number}"
        for name in ("layernorm_before", "layernorm_after"):
            yield f"{layer}.{name}.weight", (size,), True
            yield f"{layer}.{name}.bias", (size,), False
        for name in ("q_proj", "k_proj", "v_proj", "projection_layer"):
            yield from _dense(f"{layer}.attention.{name}", size, size)
        yield from _dense(f"{layer}.mlp.fc1", inner, size)
        yield from _dense(f"{layer}.mlp.fc2", size, inner)
        yield f"{layer}.lambda_1", (size,), True
        yield f"{layer}.lambda_2", (size,), True
    yield "multi_modal_projector.layer_norm.weight", (4 * size,), True
    yield "multi_modal_projector.layer_norm.bias", (4 * size,), False
    yield from _dense("multi_modal_projector.linear_1", width, 4 * size)
    yield from _dense("multi_modal_projector.linear_2", width, width)


def _qwen(vision: dict[str, Any], width: int) -> Iterator[Tensor]:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    square = size * vision["spatial_merge_size"] ** 2
    yield "visual.patch_embed.proj.weight", (size, 3, vision["temporal_patch_size"], patch, patch), False
    for number in range(vision["depth"]):
        block = f"visual.blocks.{number}"
        yield f"{block}.norm1.weight", (size,), True
        yield f"{block}.norm2.weight", (size,), True
        yield from _dense(f"{block}.attn.qkv", 3 * size, size)
        yield from _dense(f"{block}.attn.proj", size, size)
        yield from _dense(f"{block}.mlp.gate_proj", inner, size)
        yield from _dense(f"{block}.mlp.up_proj", inner, size)
        yield from _dense(f"{block}.mlp.down_proj", size, inner)
    yield "visual.merger.ln_q.weight", (size,), True
    yield from _dense("visual.merger.mlp.0", square, square)
    yield from _dense("visual.merger.mlp.2", width, square)
