"""Phi-4-multimodal: transformers' Phi-3 and image embedding, with pictures in plain torch, and with the adapter's
products added to the weights where there are images."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tests.adapters import merge, shapes_of, write_adapter
from tests.vl.published.model import PublishedModel, normalized
from tests.vl.tiny_parts import CLIP, IMAGE_ID, TEXT

__all__ = ["Phi4", "Phi4Published"]

SIDE, PATCH, MOST = CLIP["image_size"], CLIP["patch_size"], 6
HALVES = [0.5, 0.5, 0.5]
_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"}
_TOWER = {
    **{key: value for key, value in CLIP.items() if key not in ("model_type", "projection_dim")},
    "crop_size": SIDE,
    "image_token_id": IMAGE_ID,
}
_HEARS = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 8,
    "depthwise_separable_out_channel": 8,
    "nemo_conv_channels": 8,
}


class Phi4(PublishedModel):
    architecture = "Phi4MultimodalForCausalLM"
    oracle = "`Phi3ForCausalLM`, with and without an adapter's products, and the image embedding of "
    oracle += "`Phi4MultimodalForCausalLM`"
    fields = {
        **_TEXT,
        "model_type": "phi4_multimodal",
        "partial_rotary_factor": 0.75,
        "vision_config": {**_TOWER, "model_type": "phi4_multimodal_vision"},
        "audio_config": _HEARS,
    }
    pictures = {
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "dynamic_hd": MOST,
        "image_mean": HALVES,
        "image_std": HALVES,
    }
    tokens = ["<|endoftext10|>"]

    def __init__(self) -> None:
        from transformers import Phi3Config, Phi3ForCausalLM, Phi4MultimodalConfig
        from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalImageEmbedding

        super().__init__()
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
        self.decoder = Phi3ForCausalLM(Phi3Config(**_TEXT, rope_parameters=rope, tie_word_embeddings=False))
        # By torch's attention, transformers hides patches from those before them where no patch is padding.
        whole = Phi4MultimodalConfig(**_TEXT, vision_config=_TOWER, audio_config=_HEARS, attn_implementation="eager")
        self.image_embed = Phi4MultimodalImageEmbedding(whole)
        self._read_by: list[Any] = []

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        def name(own: str) -> str:
            text = own.startswith("decoder.")
            return own.removeprefix("decoder.") if text else f"model.embed_tokens_extend.{own}"

        heard = {"model.embed_tokens_extend.audio_embed.up_proj_for_speech.weight": torch.zeros(2, 2)}
        return {**{name(own): tensor for own, tensor in state.items()}, **heard}

    def write_beside(self, folder: Path) -> None:
        write_adapter(folder / "vision-lora", shapes_of(self.decoder, "_proj"))

    def logits(self, ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        if not images:
            return super().logits(ids, images)
        if not self._read_by:
            own = copy.deepcopy(self.decoder)
            self._read_by.append(merge(own, shapes_of(own, "_proj")))
        plain, self.decoder = self.decoder, self._read_by[0]
        try:
            return super().logits(ids, images)
        finally:
            self.decoder = plain

    def picture(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        """Return the numbers of the image on its canvas, and which of its patches count."""
        columns, rows = math.ceil(image.width / SIDE), math.ceil(image.height / SIDE)
        if columns * rows > MOST:
            columns, rows = closest(image.width, image.height)
        across, down = columns * SIDE / image.width, rows * SIDE / image.height
        if across < down:
            width, height = columns * SIDE, int(image.height * across)
        else:
            width, height = int(image.width * down), rows * SIDE
        if min(width, height) < 10:
            raise ValueError("too long")
        canvas = Image.new("RGB", (columns * SIDE, rows * SIDE), (255, 255, 255))
        canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR), (0, 0))
        mask = torch.ones(rows * SIDE // PATCH, columns * SIDE // PATCH)
        if canvas.width - width >= PATCH:
            mask[:, -((canvas.width - width) // PATCH) :] = 0
        if canvas.height - height >= PATCH:
            mask[-((canvas.height - height) // PATCH) :] = 0
        return normalized(canvas, HALVES, HALVES), mask

    def tiled(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        """Return the numbers of the whole and of tiles, and which of their patches count."""
        numbers, mask = self.picture(image)
        small = F.interpolate(numbers[None], size=(SIDE, SIDE), mode="bicubic")[0]
        side = SIDE // PATCH
        rows, columns = mask.shape[0] // side, mask.shape[1] // side
        corners = [(row, column) for row in range(rows) for column in range(columns)]
        tiles = [numbers[:, y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE] for y, x in corners]
        masks = [mask[y * side : (y + 1) * side, x * side : (x + 1) * side] for y, x in corners]
        return torch.stack([small, *tiles]), torch.stack([torch.ones(side, side), *masks])

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return self.tiled(image)[0].numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        return torch.cat([self.seen(image) for image in images])

    def seen(self, image: Image.Image) -> Tensor:
        numbers, masks = self.tiled(image)
        canvas, mask = self.picture(image)
        side = SIDE // PATCH // 2
        rows, columns = int(mask[::2, 0].sum()), int(mask[0, ::2].sum())
        count = side * (side + 1) + 1 + rows * (columns + 1)
        found: Tensor = self.image_embed(
            torch.full((1, count), IMAGE_ID),
            torch.zeros(1, count, TEXT["hidden_size"]),
            numbers[None],
            torch.tensor([canvas.shape[1:]]),
            masks[None],
        )
        return found[0]


def closest(width: int, height: int) -> tuple[int, int]:
    """Return columns and rows of the ratio nearest to an image's."""
    best, nearest = (1, 1), math.inf
    shapes = [(i, j) for i in range(1, MOST + 1) for j in range(1, MOST + 1) if i * j <= MOST]
    for i, j in sorted(shapes, key=lambda each: each[0] * each[1]):
        away = abs(width / height - i / j)
        if away < nearest or (away == nearest and width * height > SIDE * SIDE * i * j / 2):
            best, nearest = (i, j), away
    return best


class Phi4Published(Phi4):
    """Under its authors' names, with factors of adapters among the weights."""

    architecture = "Phi4MMForCausalLM"
    fields = {**Phi4.fields, "model_type": "phi4mm"}

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {
            "img_projection_up": "img_projection.0",
            "img_projection_down": "img_projection.2",
            "global_img_feature_extensor": "glb_GN",
            "sub_img_feature_extensor": "sub_GN",
        }
        found: dict[str, Tensor] = {}
        for name, tensor in super().renamed(state).items():
            for theirs, published in names.items():
                name = name.replace(theirs, published)
            stem, dot, suffix = name.rpartition(".")
            if stem.endswith("_proj") and ".layers." in stem and "image_embed" not in stem:
                found[f"{stem}.lora_A.vision{dot}{suffix}"] = torch.zeros(4, tensor.shape[1])
                found[f"{stem}.lora_B.speech{dot}{suffix}"] = torch.zeros(tensor.shape[0], 4)
                stem += ".base_layer"
            found[f"{stem}{dot}{suffix}"] = tensor
        return found
