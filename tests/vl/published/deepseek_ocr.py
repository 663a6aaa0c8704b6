"""DeepSeek-OCR: the decoder of DeepSeek-VL2-Tiny, transformers' SAM and CLIP, with what is learned of places stretched
for tiles, and the joining of pictures as the published code has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from tests.vl.published.deepseek_vl2 import DeepseekVL2, DeepseekVL2Tiny
from tests.vl.published.model import normalized
from tests.vl.tiny_parts import TEXT

__all__ = ["DeepseekOCR"]

WHOLE, TILE, WIDTH, CHANNELS = 192, 128, 24, 16
HALVES = [0.5, 0.5, 0.5]
_SAM = {
    "hidden_size": 24,
    "mlp_dim": 96,
    "output_channels": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 16,
    "window_size": 3,
    "global_attn_indexes": [1],
}
_CLIP = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 42,
    "patch_size": 14,
}
_SAM_NAMES = {
    "patch_embed.projection": "patch_embed.proj",
    "layers.": "blocks.",
    "layer_norm": "norm",
    "neck.conv1": "neck.0",
    "neck.norm1": "neck.1",
    "neck.conv2": "neck.2",
    "neck.norm2": "neck.3",
}


class DeepseekOCR(DeepseekVL2Tiny):
    architecture = "DeepseekOCRForCausalLM"
    oracle = "`DeepseekV2ForCausalLM` with attention of `LlamaForCausalLM`, `SamVisionEncoder`, `CLIPVisionModel`, and "
    oracle += "the rest in plain torch"
    fields = {
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [[WHOLE, WHOLE]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": DeepseekVL2Tiny.fields["language_config"],
        "projector_config": {"projector_type": "linear", "input_dim": 2 * WIDTH, "n_embed": TEXT["hidden_size"]},
        "vision_config": {
            "image_size": WHOLE,
            "model_name": "deeplip_b_l",
            "model_type": "vision",
            "width": {
                "clip-l-14-224": {"heads": 2, "image_size": 42, "layers": 2, "patch_size": 14, "width": WIDTH},
                "sam_vit_b": {
                    "downsample_channels": [CHANNELS, WIDTH],
                    "global_attn_indexes": [1],
                    "heads": 2,
                    "layers": 3,
                    "output_channels": 6,
                    "width": 24,
                    "window_size": 3,
                },
            },
        },
    }
    files = {"processor_config.json": {"image_mean": HALVES, "image_std": HALVES, "tile_size": TILE}}

    def __init__(self) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel
        from transformers.models.sam.configuration_sam import SamVisionConfig
        from transformers.models.sam.modeling_sam import SamVisionEncoder

        super(DeepseekVL2, self).__init__()
        self.decoder = self.make_decoder()
        self.sam_model, of_tiles = (
            SamVisionEncoder(SamVisionConfig(**_SAM, image_size=size, attn_implementation="eager"))
            for size in (WHOLE, TILE)
        )
        # No module of this one, as its weights are those of the other.
        self.__dict__["tiles_model"] = of_tiles
        self.net_2 = nn.Conv2d(6, CHANNELS, 3, stride=2, padding=1, bias=False)
        self.net_3 = nn.Conv2d(CHANNELS, WIDTH, 3, stride=2, padding=1, bias=False)
        self.tower = CLIPVisionModel(CLIPVisionConfig(**_CLIP))
        hidden = TEXT["hidden_size"]
        self.project = nn.Linear(2 * WIDTH, hidden)
        self.image_newline, self.view_seperator = (nn.Parameter(torch.empty(hidden)) for _ in range(2))

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            if part == "decoder":
                found |= {own.removeprefix("language."): each for own, each in self.of_decoder(rest, tensor).items()}
            elif part == "sam_model":
                rest = rest.replace("neck.layer_norm", "neck.norm")
                for theirs, own in _SAM_NAMES.items():
                    rest = rest.replace(theirs, own)
                found[f"model.sam_model.{rest}"] = tensor
            elif part in ("net_2", "net_3"):
                found[f"model.sam_model.{name}"] = tensor
            elif part == "tower" and "post_layernorm" not in rest:
                rest = rest.replace("encoder.", "transformer.")
                if "k_proj" in rest or "v_proj" in rest:
                    continue
                if "q_proj" in rest:
                    rest = rest.replace("q_proj", "qkv_proj")
                    tensor = torch.cat([state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"])
                found[f"model.vision_model.{rest}"] = tensor
            elif part != "tower":
                found[f"model.{name.replace('project.', 'projector.layers.')}"] = tensor
        return found

    def pictures_of(self, image: Image.Image) -> tuple[list[Image.Image], int, int]:
        """Return the whole and the tiles, and their rows and columns."""
        whole = ImageOps.pad(image, (WHOLE, WHOLE), color=(127, 127, 127))
        if image.width <= TILE and image.height <= TILE:
            return [whole], 0, 0
        shapes = [(i, j) for i in range(1, 10) for j in range(1, 10) if 2 <= i * j <= 9]
        best, nearest = (1, 1), float("inf")
        for i, j in sorted(shapes, key=lambda each: each[0] * each[1]):
            away = abs(image.width / image.height - i / j)
            if away < nearest or (away == nearest and image.width * image.height > TILE * TILE * i * j / 2):
                best, nearest = (i, j), away
        columns, rows = best
        canvas = image.resize((columns * TILE, rows * TILE))
        corners = [(x * TILE, y * TILE) for y in range(rows) for x in range(columns)]
        return [whole, *(canvas.crop((x, y, x + TILE, y + TILE)) for x, y in corners)], rows, columns

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return np.concatenate([normalized(each, HALVES, HALVES).numpy().ravel() for each in self.pictures_of(image)[0]])

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        self.stretch()
        found = []
        for image in images:
            (whole, *tiles), rows, columns = self.pictures_of(image)
            if tiles:
                grids = [self.seen(tile, self.tiles_model) for tile in tiles]
                side = len(grids[0])
                for y in range(rows * side):
                    for x in range(columns * side):
                        found.append(grids[y // side * columns + x // side][y % side][x % side])
                    found.append(self.image_newline)
            for line in self.seen(whole, self.sam_model):
                found += [*line, self.image_newline]
            found.append(self.view_seperator)
        return torch.stack(found)

    def seen(self, picture: Image.Image, sam: Any) -> Tensor:
        """Return the tokens of a picture [side, side, hidden]."""
        x = sam(normalized(picture, HALVES, HALVES)[None]).last_hidden_state
        patches = self.net_3(self.net_2(x)).flatten(2).transpose(1, 2)
        side, embeddings = round(patches.shape[1] ** 0.5), self.tower.embeddings
        learned = embeddings.position_embedding.weight
        grid = learned[1:].view(1, 3, 3, -1).permute(0, 3, 1, 2)
        if side != 3:
            grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True, align_corners=False)
        positions = torch.cat([learned[:1], grid.permute(0, 2, 3, 1).reshape(side * side, -1)])
        hidden = torch.cat([embeddings.class_embedding.view(1, 1, -1), patches], 1) + positions
        read = self.tower.encoder(inputs_embeds=self.tower.pre_layrnorm(hidden)).last_hidden_state
        tokens: Tensor = self.project(torch.cat([read[:, 1:], patches], -1))
        return tokens.view(side, side, -1)

    def stretch(self) -> None:
        """Give the encoder of tiles the other one's weights, those of places stretched."""
        state = dict(self.sam_model.state_dict())
        side = TILE // 16
        grid = state["pos_embed"].permute(0, 3, 1, 2)
        grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True, align_corners=False)
        state["pos_embed"] = grid.permute(0, 2, 3, 1)
        for name, tensor in state.items():
            if "layers.1.attn.rel_pos" in name:
                state[name] = F.interpolate(tensor.T[None], 2 * side - 1, mode="linear")[0].T
        self.tiles_model.load_state_dict(state)
        self.tiles_model.eval()
