"""Phi-3-vision: transformers' Phi-3 and CLIP, and the joining of tiles as the published code does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.model import CLIP_MEAN, CLIP_STD, PublishedModel, normalized
from tests.vl.tiny_parts import CLIP, TEXT

__all__ = ["Phi3V"]

SIDE, MOST = CLIP["image_size"], 6
WIDTH = 4 * CLIP["hidden_size"]
_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"}


class Phi3V(PublishedModel):
    architecture = "Phi3VForCausalLM"
    oracle = "`Phi3ForCausalLM`, `CLIPVisionModel`, and the tiles joined in plain torch"
    fields = {
        **_TEXT,
        "model_type": "phi3_v",
        "sliding_window": 2047,
        "img_processor": {
            "image_dim_out": CLIP["hidden_size"],
            "model_name": "./vit/tiny",
            "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
    }
    pictures = {
        "image_processor_type": "Phi3VImageProcessor",
        "num_crops": MOST,
        "num_img_tokens": 144,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    tokens = ["<|image|>"]
    files = {"vit/tiny/config.json": CLIP}

    def __init__(self) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM

        super().__init__()
        self.decoder = Phi3ForCausalLM(Phi3Config(**_TEXT, sliding_window=2047))
        self.tower = CLIPVisionModel(CLIPVisionConfig(**CLIP))
        self.glb_GN, self.sub_GN = nn.Parameter(torch.empty(1, 1, WIDTH)), nn.Parameter(torch.empty(1, 1, 1, WIDTH))
        hidden = TEXT["hidden_size"]
        self.img_projection = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        def name(own: str) -> str:
            if own.startswith("decoder."):
                return own.removeprefix("decoder.")
            own = own.replace("tower.", "img_processor.vision_model.", 1)
            return f"model.vision_embed_tokens.{own}"

        return {name(own): tensor for own, tensor in state.items()}

    def canvas(self, image: Image.Image) -> Image.Image:
        lying = image.width < image.height
        image = image.transpose(Image.Transpose.TRANSPOSE) if lying else image
        width, height = image.size
        scale = 1
        while scale * np.ceil(scale / (width / height)) <= MOST:
            scale += 1
        new_width = (scale - 1) * SIDE
        new_height = int(new_width / (width / height))
        image = image.resize((new_width, new_height), Image.Resampling.BILINEAR)
        target = int(np.ceil(new_height / SIDE) * SIDE)
        whole = Image.new("RGB", (new_width, target), (255, 255, 255))
        whole.paste(image, (0, int((target - new_height) / 2)))
        return whole.transpose(Image.Transpose.TRANSPOSE) if lying else whole

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        numbers = normalized(self.canvas(image))
        small = F.interpolate(numbers[None], size=(SIDE, SIDE), mode="bicubic")
        rows, columns = numbers.shape[1] // SIDE, numbers.shape[2] // SIDE
        tiles = [
            numbers[None, :, row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
            for row in range(rows)
            for column in range(columns)
        ]
        return torch.cat([small, *tiles]).numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        rows = []
        for image in images:
            pixels, canvas = torch.from_numpy(self.pixels(image)), self.canvas(image)
            patches = self.tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
            across, down = canvas.width // SIDE, canvas.height // SIDE
            whole = self.lines(patches[:1], 1, 1)
            rows.append(torch.cat([self.lines(patches[1:], down, across), self.glb_GN[0], whole]))
        projected: Tensor = self.img_projection(torch.cat(rows))
        return projected

    def lines(self, patches: Tensor, down: int, across: int) -> Tensor:
        """Token by token, from where it is in the picture."""
        side = CLIP["image_size"] // CLIP["patch_size"]
        grids = patches.view(down, across, side, side, -1)
        found = []
        for y in range(down * side // 2):
            for x in range(across * side // 2):
                square = [
                    grids[(2 * y + dy) // side, (2 * x + dx) // side, (2 * y + dy) % side, (2 * x + dx) % side]
                    for dy in (0, 1)
                    for dx in (0, 1)
                ]
                found.append(torch.cat(square))
            found.append(self.sub_GN.flatten())
        return torch.stack(found)
