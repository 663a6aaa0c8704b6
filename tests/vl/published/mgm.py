"""MGM: transformers' Llama, CLIP and ConvNeXt, and what joins them in plain torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.model import CLIP_MEAN, CLIP_STD, PublishedModel, normalized
from tests.vl.tiny_parts import CLIP, TEXT

__all__ = ["MGM", "MGMHD"]

LARGE = 128
SMALL, WIDTH = CLIP["image_size"], CLIP["hidden_size"]
SIDE = SMALL // CLIP["patch_size"]
DEPTHS, SIZES = [1, 1, 2, 1], [8, 12, 16, 20]
_NAMES = {
    "fine.embeddings.patch_embeddings.": "vision_tower_aux.vision_stem.0.",
    "fine.embeddings.layernorm.": "vision_tower_aux.vision_stem.1.",
    "fine.encoder.stages.": "vision_tower_aux.vision_stages.",
    "downsampling_layer.": "downsample.",
    ".layers.": ".blocks.",
    ".dwconv.": ".conv_dw.",
    ".layernorm.": ".norm.",
    ".pwconv1.": ".mlp.fc1.",
    ".pwconv2.": ".mlp.fc2.",
    ".layer_scale_parameter": ".gamma",
}


class MGM(PublishedModel):
    architecture = "MGMLlamaForCausalLM"
    also = ("MiniGeminiLlamaForCausalLM",)
    oracle = "`LlamaForCausalLM`, `CLIPVisionModel`, `ConvNextModel`, and the rest in plain torch"
    fields = {
        **TEXT,
        "model_type": "mgm",
        "image_aspect_ratio": "pad",
        "image_size_aux": LARGE,
        "mm_hidden_size": WIDTH,
        "mm_hidden_size_aux": sum(SIZES),
        "mm_projector_type": "mlp2x_gelu",
        "mm_use_im_start_end": False,
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "vit/tiny",
        "mm_vision_tower_aux": "fine/tiny",
        "optimize_vision_tower": False,
        "optimize_vision_tower_aux": False,
    }
    tokens = ["<image>"]
    files = {
        "vit/tiny/config.json": CLIP,
        "vit/tiny/preprocessor_config.json": {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "crop_size": SMALL},
        "fine/tiny/config.json": {"depths": DEPTHS, "hidden_sizes": SIZES},
    }
    grid = 1

    def __init__(self) -> None:
        from transformers import (
            CLIPVisionConfig,
            CLIPVisionModel,
            ConvNextConfig,
            ConvNextModel,
            LlamaConfig,
            LlamaForCausalLM,
        )

        super().__init__()
        self.decoder = LlamaForCausalLM(LlamaConfig(**TEXT))
        self.tower = CLIPVisionModel(CLIPVisionConfig(**CLIP))
        self.fine = ConvNextModel(ConvNextConfig(depths=DEPTHS, hidden_sizes=SIZES))
        cells, hidden = sum(SIZES), TEXT["hidden_size"]
        self.vlm_uni_query_projector = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.vlm_uni_aux_projector = nn.Sequential(nn.LayerNorm(cells), nn.Linear(cells, WIDTH))
        self.vlm_uni_val_projector = nn.Sequential(nn.LayerNorm(cells), nn.Linear(cells, WIDTH))
        self.mm_projector = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        def name(own: str) -> str:
            if own.startswith("decoder."):
                return own.removeprefix("decoder.")
            if own.startswith("fine."):
                for theirs, published in _NAMES.items():
                    own = own.replace(theirs, published)
            return "model." + own.replace("tower.", "vision_tower.vision_tower.vision_model.", own.startswith("tower."))

        # There is no norm behind the stages.
        return {name(own): tensor for own, tensor in state.items() if not re.match(r"fine\.layernorm\.", own)}

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        side = max(image.size)
        square = Image.new("RGB", (side, side), tuple(int(each * 255) for each in CLIP_MEAN))  # type: ignore[arg-type]
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return normalized(square.resize((LARGE, LARGE), Image.Resampling.BICUBIC))[None].numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        return torch.cat([self.seen(torch.from_numpy(self.pixels(image))) for image in images])

    def seen(self, pixels: Tensor) -> Tensor:
        grid, side = self.grid, self.grid * SMALL
        shown = F.interpolate(pixels, size=[side, side], mode="bilinear", align_corners=False)
        maps = self.fine(pixels, output_hidden_states=True).hidden_states[1:]
        large = torch.cat([F.interpolate(each, size=maps[0].shape[2:], mode="bilinear") for each in maps], 1)
        pictures = []
        if grid > 1:
            whole = F.interpolate(shown, size=[SMALL, SMALL], mode="bilinear", align_corners=False)
            pictures.append((whole, F.interpolate(large, scale_factor=1 / grid, mode="bilinear", align_corners=False)))
        cells = large.shape[-1] // grid
        for row in range(grid):
            for column in range(grid):
                small = shown[:, :, row * SMALL : (row + 1) * SMALL, column * SMALL : (column + 1) * SMALL]
                part = large[:, :, row * cells : (row + 1) * cells, column * cells : (column + 1) * cells]
                pictures.append((small, part))
        return torch.cat([self.tokens_of(small, part) for small, part in pictures])

    def tokens_of(self, small: Tensor, large: Tensor) -> Tensor:
        """One patch after the other."""
        patches = self.tower(small, output_hidden_states=True).hidden_states[-2][0, 1:]
        step, found = large.shape[-1] // SIDE, []
        for index, patch in enumerate(patches):
            row, column = divmod(index, SIDE)
            cells = large[0, :, row * step : (row + 1) * step, column * step : (column + 1) * step].flatten(1).T
            query, keys = self.vlm_uni_query_projector(patch), self.vlm_uni_aux_projector(cells)
            shares = (keys @ query / WIDTH**0.5).softmax(0)
            found.append(patch + shares @ self.vlm_uni_val_projector(cells))
        projected: Tensor = self.mm_projector(torch.stack(found))
        return projected


class MGMHD(MGM):
    """Four tiles and the whole."""

    fields = {**MGM.fields, "image_grid": 2, "image_global": True}
    grid = 2
