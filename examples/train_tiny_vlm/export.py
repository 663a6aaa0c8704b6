"""Writes the trained network as a checkpoint folder in LLaVA's hub layout."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer
from train_tiny_chat.export import text_config, write_folder, write_json

from .network import VisionNetwork
from .scenes import SIDE
from .tokenizer import CHAT_TEMPLATE

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""Of a picture's colours, as the tower reads them."""


def export_checkpoint(network: VisionNetwork, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes configuration, weights, tokenizer and what the preprocessor has to know."""
    tower, text = network.tower_shape, network.language_model.shape
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": network.image_token,
        "image_seq_length": tower.tokens,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "text_config": text_config(text, tokenizer),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": tower.hidden,
            "intermediate_size": tower.intermediate,
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "image_size": tower.image,
            "patch_size": tower.patch,
            "projection_dim": tower.hidden,
            "layer_norm_eps": tower.norm_epsilon,
            "hidden_act": "quick_gelu",
        },
    }
    write_folder(network, tokenizer, folder, config, text.positions, CHAT_TEMPLATE)
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "size": {"height": SIDE, "width": SIDE},
            "resample": int(Image.Resampling.BICUBIC),
            "do_center_crop": False,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(MEAN),
            "image_std": list(STD),
            "do_convert_rgb": True,
        },
    )
