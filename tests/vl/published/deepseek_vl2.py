"""DeepSeek-VL2: transformers' DeepSeek-V2 and the layers of its SigLIP; tiles and their joining as the published code
has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from tests.vl.published.model import PublishedModel, normalized
from tests.vl.tiny_parts import TEXT

__all__ = ["DeepseekVL2", "DeepseekVL2Tiny"]

# Two pixels of a tile's side are no whole patch, and the patches along it are odd in number.
SIDE, PATCH, WIDTH, PATCHES, TOKENS = 23, 7, 24, 3, 2
SHAPES = [[23, 23], [23, 46], [46, 23], [46, 46], [69, 23]]
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
    "topk_method": "greedy",
}


class DeepseekVL2(PublishedModel):
    architecture = "DeepseekVLV2ForCausalLM"
    oracle = "`DeepseekV2ForCausalLM`, the layers of `SiglipVisionModel`, and the tiles joined in plain torch"
    fields = {
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": SHAPES,
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": {**_TEXT, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]},
        "projector_config": {"model_type": "mlp_projector", "input_dim": WIDTH, "n_embed": TEXT["hidden_size"]},
        "vision_config": {
            "layers": 2,
            "heads": 2,
            "mlp_ratio": 1.7,
            "model_name": "siglip_tiny",
            "model_type": "vision",
            "patch_size": PATCH,
            "image_size": SIDE,
            "width": WIDTH,
        },
    }
    files = {
        "processor_config.json": {
            "candidate_resolutions": SHAPES,
            "downsample_ratio": 2,
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.3],
            "image_token": "<image>",
            "patch_size": PATCH,
            "processor_class": "DeepseekVLV2Processor",
        }
    }
    tokens = ["<image>"]

    def __init__(self) -> None:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        self.decoder = self.make_decoder()
        tower = {"hidden_size": WIDTH, "intermediate_size": int(WIDTH * 1.7), "num_hidden_layers": 2}
        side = PATCHES * PATCH
        self.tower = SiglipVisionModel(
            SiglipVisionConfig(**tower, num_attention_heads=2, image_size=side, patch_size=PATCH, vision_use_head=False)
        )
        hidden = TEXT["hidden_size"]
        self.projector = nn.Sequential(nn.Linear(4 * WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.image_newline, self.view_seperator = (nn.Parameter(torch.empty(hidden)) for _ in range(2))

    def make_decoder(self) -> nn.Module:
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        config = DeepseekV2Config(**_TEXT, n_group=1, topk_group=1, routed_scaling_factor=1.0)
        return DeepseekV2ForCausalLM(config)

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, tensor in state.items():
            if name.startswith("decoder."):
                found |= self.of_decoder(name.removeprefix("decoder."), tensor)
            elif "self_attn.k_proj" in name or "self_attn.v_proj" in name:
                continue
            elif "self_attn.q_proj" in name:
                parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                found[_timm(name.replace("self_attn.q_proj", "attn.qkv"))] = torch.cat(parts)
            else:
                found[_timm(name)] = tensor[None] if "position_embedding" in name else tensor
        return found

    def of_decoder(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Experts one by one, as files have them."""
        stem, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            return {
                f"language.{stem}.experts.{number}.{half}.weight": rows
                for number, expert in enumerate(tensor)
                for half, rows in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            }
        if part == "down_proj":
            return {
                f"language.{stem}.experts.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)
            }
        return {f"language.{name}": tensor}

    def pad(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return ImageOps.pad(image, (width, height), color=(127, 102, 127))

    def tiles(self, image: Image.Image, alone: bool = True) -> tuple[list[Image.Image], int, int]:
        best, kept, wasted = (0, 0), 0, float("inf")
        for width, height in SHAPES if alone else SHAPES[:1]:
            scale = min(width / image.width, height / image.height)
            fits = int(image.width * scale) * int(image.height * scale)
            effective = min(fits, image.width * image.height)
            if effective > kept or (effective == kept and width * height - effective < wasted):
                best, kept, wasted = (width, height), effective, width * height - effective
        local = self.pad(image, *best)
        found = [self.pad(image, SIDE, SIDE)]
        for top in range(0, best[1], SIDE):
            for left in range(0, best[0], SIDE):
                found.append(local.crop((left, top, left + SIDE, top + SIDE)))
        return found, best[1] // SIDE, best[0] // SIDE

    def numbers(self, tile: Image.Image) -> Tensor:
        return normalized(tile, [0.5, 0.4, 0.5], [0.5, 0.5, 0.3])

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return np.stack([self.numbers(tile).numpy() for tile in self.tiles(image)[0]])

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        found = []
        for image in images:
            tiles, down, across = self.tiles(image, alone=len(images) <= 2)
            pixels = torch.stack([self.numbers(tile) for tile in tiles])[..., : PATCHES * PATCH, : PATCHES * PATCH]
            patches = self.tower(pixels).last_hidden_state.view(len(tiles), PATCHES, PATCHES, WIDTH)
            padded = torch.zeros(len(tiles), 2 * TOKENS, 2 * TOKENS, WIDTH)
            padded[:, :PATCHES, :PATCHES] = patches
            squares = [
                padded[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].permute(0, 3, 1, 2).flatten(1)
                for y in range(TOKENS)
                for x in range(TOKENS)
            ]
            tokens = self.projector(torch.stack(squares, 1)).view(len(tiles), TOKENS, TOKENS, -1)
            rows = [*tokens[0, 0], self.image_newline, *tokens[0, 1], self.image_newline, self.view_seperator]
            for y in range(down * TOKENS):
                for x in range(across * TOKENS):
                    tile = 1 + y // TOKENS * across + x // TOKENS
                    rows.append(tokens[tile, y % TOKENS, x % TOKENS])
                rows.append(self.image_newline)
            found.append(torch.stack(rows))
        return torch.cat(found)


def _timm(name: str) -> str:
    changes = {
        "tower.embeddings.patch_embedding": "vision.patch_embed.proj",
        "tower.embeddings.position_embedding.weight": "vision.pos_embed",
        "tower.encoder.layers": "vision.blocks",
        "tower.post_layernorm": "vision.norm",
        "self_attn.out_proj": "attn.proj",
        "layer_norm": "norm",
        "projector.": "projector.layers.",
    }
    for theirs, own in changes.items():
        name = name.replace(theirs, own)
    return name


class DeepseekVL2Tiny(DeepseekVL2):
    """Its decoder has heads with keys of their own."""

    oracle = "the same with the attention of `LlamaForCausalLM`"
    fields = {
        **DeepseekVL2.fields,
        "language_config": {**DeepseekVL2.fields["language_config"], "use_mla": False, "kv_lora_rank": None},
    }

    def make_decoder(self) -> nn.Module:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

        model: Any = super().make_decoder()
        config = LlamaConfig(**{key: value for key, value in TEXT.items() if key != "head_dim"}, head_dim=16)
        config.num_key_value_heads = 2
        config._attn_implementation = "sdpa"
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn = LlamaAttention(config, number)
        return model
