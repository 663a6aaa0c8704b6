"""MiniCPM-V: transformers' decoders and the layers of its Idefics2 tower; places, resampler and slices as the published
code has them, each picture by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.model import PublishedModel, normalized
from tests.vl.tiny_parts import TEXT

__all__ = ["MiniCPMV25", "MiniCPMV26", "MiniCPMV40", "MiniCPMV45"]

PATCH, SIDE, MOST, QUERIES, WIDTH = 7, 28, 5, 5, 256
_TOWER = {
    "hidden_size": 24,
    "image_size": 70,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": PATCH,
}
_TEXT = {**TEXT, "hidden_size": WIDTH}
_HALVES = [0.5, 0.5, 0.5]


def _multiple(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def _best_size(width: float, height: float, upscale: bool) -> tuple[int, int]:
    if width * height > SIDE * SIDE or upscale:
        ratio = width / height
        height = int(SIDE / math.sqrt(ratio))
        width = int(height * ratio)
    return _multiple(width, PATCH), _multiple(height, PATCH)


def _best_grid(width: int, height: int) -> list[int] | None:
    multiple = min(math.ceil(width * height / (SIDE * SIDE)), MOST)
    if multiple <= 1:
        return None
    best, error = [1, 1], float("inf")
    for count in (multiple - 1, multiple, multiple + 1):
        if count == 1 or count > MOST:
            continue
        for columns in range(1, count + 1):
            if count % columns == 0:
                away = abs(math.log(width / height) - math.log(columns / (count // columns)))
                if away < error:
                    best, error = [columns, count // columns], away
    return best


class _Resampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(QUERIES, WIDTH))
        self.kv_proj = nn.Linear(_TOWER["hidden_size"], WIDTH, bias=False)
        self.attn = nn.MultiheadAttention(WIDTH, WIDTH // 128, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        x = self.ln_kv(self.kv_proj(x))
        waves = torch.tensor(
            [
                wave(place / 10000 ** (each / (WIDTH // 4)))
                for row in range(rows)
                for column in range(columns)
                for place in (column, row)
                for wave in (math.sin, math.cos)
                for each in range(WIDTH // 4)
            ]
        ).view(rows * columns, WIDTH)
        read = self.attn(self.ln_q(self.query)[None], (x + waves)[None], x[None], need_weights=False)[0][0]
        return self.ln_post(read) @ self.proj


class MiniCPMV25(PublishedModel):
    architecture = "MiniCPMV"
    oracle = "`LlamaForCausalLM`, the layers of `Idefics2VisionTransformer`, and the rest in plain torch"
    version = "2.5"
    fields = {
        **_TEXT,
        "version": "2.5",
        "model_type": "minicpmv",
        "drop_vision_last_layer": False,
        "query_num": QUERIES,
        "slice_config": {"max_slice_nums": MOST, "patch_size": PATCH, "model_type": "minicpmv"},
        "vision_config": {**_TOWER, "model_type": "idefics2"},
    }
    pictures = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "max_slice_nums": MOST,
        "scale_resolution": SIDE,
        "patch_size": PATCH,
        "image_feature_size": QUERIES,
        "norm_mean": _HALVES,
        "norm_std": [0.5, 0.4, 0.5],
        "version": 2.5,
    }
    tokens = ["<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]

    def __init__(self) -> None:
        from transformers import Idefics2VisionConfig
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        super().__init__()
        self.decoder = self.make_decoder()
        layers = self.fields["vision_config"]["num_hidden_layers"] - self.fields["drop_vision_last_layer"]
        self.vpm = Idefics2VisionTransformer(Idefics2VisionConfig(**{**_TOWER, "num_hidden_layers": layers}))
        self.resampler = _Resampler()

    def make_decoder(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**_TEXT))

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("decoder.", "llm.", 1): tensor for name, tensor in state.items()}

    def slices(self, image: Image.Image) -> list[Image.Image]:
        grid = _best_grid(*image.size)
        found = [image.resize(_best_size(*image.size, upscale=grid is None), Image.Resampling.BICUBIC)]
        if grid is not None:
            columns, rows = grid
            width, height = _multiple(image.width, columns) / columns, _multiple(image.height, rows) / rows
            width, height = _best_size(width, height, upscale=True)
            large = image.resize((width * columns, height * rows), Image.Resampling.BICUBIC)
            found += [
                large.crop((left, top, left + width, top + height))
                for top in range(0, large.height, height)
                for left in range(0, large.width, width)
            ]
        return found

    def numbers(self, picture: Image.Image) -> Tensor:
        return normalized(picture, self.pictures["norm_mean"], self.pictures["norm_std"])

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        patches = [
            torch.nn.functional.unfold(self.numbers(each)[None], PATCH, stride=PATCH)[0].T
            for each in self.slices(image)
        ]
        return torch.cat(patches).numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        found = []
        for picture in (each for image in images for each in self.slices(image)):
            rows, columns = picture.height // PATCH, picture.width // PATCH
            embedded = self.vpm.embeddings.patch_embedding(self.numbers(picture)[None]).flatten(2).transpose(1, 2)
            places = self.places(1, rows * columns) if self.version == "2.5" else self.places(rows, columns)
            x = embedded + self.vpm.embeddings.position_embedding(torch.tensor(places))
            for layer in self.vpm.encoder.layers:
                x = layer(x, attention_mask=None)
                x = x[0] if isinstance(x, tuple) else x
            found.append(self.resampler(self.vpm.post_layernorm(x)[0], rows, columns))
        return torch.cat(found)

    def places(self, rows: int, columns: int) -> list[int]:
        side = _TOWER["image_size"] // PATCH
        bounds = np.arange(1 / side, 1.0, 1 / side, dtype=np.float32)

        def bucket(place: int, count: int) -> int:
            return int(np.searchsorted(bounds, np.float32(place * (1 / count)), side="right"))

        return [bucket(row, rows) * side + bucket(column, columns) for row in range(rows) for column in range(columns)]


class MiniCPMV26(MiniCPMV25):
    """Without its tower's last layer."""

    oracle = "the same with `Qwen2ForCausalLM`"
    version = "2.6"
    fields = {
        **MiniCPMV25.fields,
        "version": 2.6,
        "drop_vision_last_layer": True,
        "use_image_id": True,
        "vision_config": {**_TOWER, "model_type": "siglip"},
    }
    pictures = {**MiniCPMV25.pictures, "version": 2.6, "use_image_id": True, "slice_mode": True}

    def make_decoder(self) -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        return Qwen2ForCausalLM(Qwen2Config(**_TEXT))


class MiniCPMV40(MiniCPMV26):
    oracle = MiniCPMV25.oracle
    version = "4.0"
    fields = {**MiniCPMV26.fields, "version": 4.0, "drop_vision_last_layer": False}
    make_decoder = MiniCPMV25.make_decoder


class MiniCPMV45(MiniCPMV26):
    oracle = "the same with `Qwen3ForCausalLM`"
    version = "4.5"
    fields = {**MiniCPMV40.fields, "version": 4.5, "batch_3d_resampler": True}

    def make_decoder(self) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(Qwen3Config(**_TEXT))
