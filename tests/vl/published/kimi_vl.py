"""Kimi-VL: transformers' DeepSeek-V3 and the tower of Kimi-K2.5, which is the same for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.model import PublishedModel, normalized
from tests.vl.tiny_parts import IMAGE_ID, TEXT

__all__ = ["KimiVL"]

WIDTH, HEADS, PATCH, LIMIT = 24, 2, 4, 60
_TEXT = {
    **{key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 2,
    "q_lora_rank": None,
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
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.4,
}


class KimiVL(PublishedModel):
    architecture = "KimiVLForConditionalGeneration"
    oracle = "`DeepseekV3ForCausalLM`, and the tower of `Kimi_K25ForConditionalGeneration`"
    fields = {
        "model_type": "kimi_vl",
        "media_placeholder_token_id": IMAGE_ID,
        "text_config": {
            **_TEXT,
            "model_type": "deepseek_v3",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": PATCH,
            "num_attention_heads": HEADS,
            "num_hidden_layers": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 40,
            "merge_kernel_size": [2, 2],
            "init_pos_emb_height": 5,
            "init_pos_emb_width": 5,
        },
    }
    pictures = {
        "image_processor_type": "KimiVLImageProcessor",
        "in_token_limit": LIMIT,
        "patch_size": PATCH,
        "merge_kernel_size": [2, 2],
        "pad_input": True,
        "image_mean": [0.5, 0.4, 0.5],
        "image_std": [0.5, 0.5, 0.3],
    }
    tokens = ["<|media_pad|>", "<|media_start|>", "<|media_content|>", "<|media_end|>"]

    def __init__(self) -> None:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
        from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

        super().__init__()
        self.decoder = DeepseekV3ForCausalLM(DeepseekV3Config(**_TEXT))
        self.tower = Kimi_K25VisionModel(
            Kimi_K25VisionConfig(
                patch_size=PATCH,
                pos_emb_height=5,
                pos_emb_width=5,
                num_attention_heads=HEADS,
                num_hidden_layers=2,
                hidden_size=WIDTH,
                intermediate_size=40,
                rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
            )
        )
        self.pre_norm = nn.LayerNorm(WIDTH, eps=1e-5)
        self.linear_1, self.linear_2 = nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, TEXT["hidden_size"])

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, tensor in state.items():
            if name.startswith("decoder."):
                found |= _of_decoder(name.removeprefix("decoder."), tensor)
            elif not name.startswith("tower."):
                found[f"multi_modal_projector.{name}"] = tensor
            elif "q_proj" in name:
                parts = [
                    _by_pairs(state[name.replace("q_proj", each)], each) for each in ("q_proj", "k_proj", "v_proj")
                ]
                found[_moonvit(name.replace("attn.q_proj", "wqkv"))] = torch.cat(parts)
            elif "k_proj" not in name and "v_proj" not in name:
                found[_moonvit(name)] = tensor
        return found

    def canvas(self, image: Image.Image) -> Image.Image:
        count = (image.width // PATCH) * (image.height // PATCH)
        if count > LIMIT:
            scale = (LIMIT / count) ** 0.5
            size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
            image = image.resize(size, Image.Resampling.BICUBIC)
        right, below = -image.width % (2 * PATCH), -image.height % (2 * PATCH)
        return Image.fromarray(np.pad(np.array(image), ((0, below), (0, right), (0, 0))))

    def patches(self, image: Image.Image) -> Tensor:
        """Row by row [rows, columns, 3, patch, patch]."""
        numbers = normalized(self.canvas(image), [0.5, 0.4, 0.5], [0.5, 0.5, 0.3])
        return numbers.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4)

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        patches = self.patches(image)
        rows, columns = patches.shape[:2]
        squares = patches.reshape(rows // 2, 2, columns // 2, 2, 3, -1).transpose(1, 2)
        return squares.reshape(rows * columns, 3, -1).numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        patches = [self.patches(image) for image in images]
        grids = torch.tensor([[1, *each.shape[:2]] for each in patches])
        seen = self.tower(torch.cat([each.flatten(0, 1) for each in patches]), grid_thw=grids).pooler_output
        found: Tensor = self.linear_2(F.gelu(self.linear_1(self.pre_norm(seen).flatten(1))))
        return found


def _by_pairs(tensor: Tensor, part: str) -> Tensor:
    """Features that turn together side by side, as files have them, which here are half a head apart."""
    if part == "v_proj":
        return tensor
    heads = tensor.view(HEADS, 2, -1, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def _moonvit(name: str) -> str:
    changes = {
        "tower.patch_embed.pos_emb.position_embeddings": "vision_tower.patch_embed.pos_emb.weight",
        "tower.patch_embed": "vision_tower.patch_embed",
        "tower.layers": "vision_tower.encoder.blocks",
        "tower.final_layernorm": "vision_tower.encoder.final_layernorm",
        "vision_vision_tower": "vision_tower",
        "norm1": "norm0",
        "norm2": "norm1",
        "fc1": "fc0",
        "fc2": "fc1",
        "attn.proj": "wo",
    }
    for theirs, own in changes.items():
        name = name.replace(theirs, own)
    return name


def _of_decoder(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts one by one, as files have them."""
    stem, _, part = name.rpartition(".experts.")
    if part == "gate_up_proj":
        return {
            f"language_model.{stem}.experts.{number}.{half}.weight": rows
            for number, expert in enumerate(tensor)
            for half, rows in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
        }
    if part == "down_proj":
        return {f"language_model.{stem}.experts.{number}.down_proj.weight": each for number, each in enumerate(tensor)}
    return {f"language_model.{name}": tensor}
