"""Parts of tiny vision-language checkpoints that several kinds share."""

from __future__ import annotations

from typing import Any

from tests.checkpoints import SPECIAL_TOKENS

__all__ = ["CLIP", "CLIP_PICTURES", "IMAGE_ID", "PARTS_TEMPLATE", "TEXT", "Kind"]

Kind = tuple[Any, dict[str, Any], list[str], str | None]
"""Config, preprocessor_config.json, special tokens and chat template."""

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
CLIP_PICTURES = {
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
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
