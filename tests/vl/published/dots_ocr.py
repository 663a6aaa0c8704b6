"""dots.ocr: transformers' Qwen2 behind the tower in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.model import CLIP_MEAN, CLIP_STD, PublishedModel, normalized
from tests.vl.tiny_parts import IMAGE_ID, TEXT

__all__ = ["DotsOCR"]

WIDTH, HEADS, INNER, PATCH, LAYERS = 24, 2, 40, 4, 2
LEAST, MOST = 8 * 8 * 2, 8 * 8 * 60
_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"}


class _Root(nn.Module):
    """A norm by the root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Root(), _Root()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH, bias=False)})
        self.attn["proj"] = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.ModuleDict({name: nn.Linear(WIDTH, INNER, bias=False) for name in ("fc1", "fc3")})
        self.mlp["fc2"] = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).view(len(x), 3, HEADS, -1).unbind(1)
        q, k = (each * angles.cos() + _quarter(each) * angles.sin() for each in (q, k))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        x = x + self.attn["proj"](torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        h = self.norm2(x)
        out: Tensor = x + self.mlp["fc2"](F.silu(self.mlp["fc1"](h)) * self.mlp["fc3"](h))
        return out


def _quarter(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class DotsOCR(PublishedModel):
    architecture = "DotsOCRForCausalLM"
    oracle = "`Qwen2ForCausalLM`, and the tower in plain torch"
    fields = {
        **_TEXT,
        "model_type": "dots_ocr",
        "attention_bias": True,
        "rope_theta": 5000.0,
        "image_token_id": IMAGE_ID,
        "vision_config": {
            "embed_dim": WIDTH,
            "hidden_size": TEXT["hidden_size"],
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "patch_size": PATCH,
            "post_norm": True,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "use_bias": False,
        },
    }
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": LEAST,
        "max_pixels": MOST,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    tokens = ["<|imgpad|>", "<|img|>", "<|endofimg|>"]

    def __init__(self) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        super().__init__()
        rope = {"rope_type": "default", "rope_theta": 5000.0}
        self.decoder = Qwen2ForCausalLM(Qwen2Config(**_TEXT, rope_parameters=rope, tie_word_embeddings=False))
        square = 4 * WIDTH
        self.proj, self.norm = nn.Conv2d(3, WIDTH, PATCH, PATCH), _Root()
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.post_trunk_norm, self.ln_q = _Root(), nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(square, square), nn.GELU(), nn.Linear(square, TEXT["hidden_size"]))

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        within = {"proj": "patch_embed.patchifier.proj", "norm": "patch_embed.patchifier.norm"}
        within |= {"ln_q": "merger.ln_q", "mlp": "merger.mlp"}

        def name(own: str) -> str:
            part, _, rest = own.partition(".")
            return rest if part == "decoder" else f"vision_tower.{within.get(part, part)}.{rest}"

        return {name(own): tensor for own, tensor in state.items()}

    def size(self, image: Image.Image) -> tuple[int, int]:
        """Return the nearest height and width in squares of patches, within the bounds of pixels."""
        factor, area = 2 * PATCH, image.height * image.width
        sides = image.height, image.width
        height, width = (round(each / factor) * factor for each in sides)
        if height * width > MOST:
            scale = math.sqrt(area / MOST)
            height, width = (max(factor, math.floor(each / scale / factor) * factor) for each in sides)
        elif height * width < LEAST:
            scale = math.sqrt(LEAST / area)
            height, width = (math.ceil(each * scale / factor) * factor for each in sides)
        return height, width

    def numbers(self, image: Image.Image) -> Tensor:
        height, width = self.size(image)
        return normalized(image.resize((width, height), Image.Resampling.BICUBIC))

    def squares(self, image: Image.Image) -> list[tuple[int, int]]:
        """Return rows and columns of patches in the order of their squares."""
        height, width = self.size(image)
        tops = [(y, x) for y in range(0, height // PATCH, 2) for x in range(0, width // PATCH, 2)]
        return [(y + dy, x + dx) for y, x in tops for dy in (0, 1) for dx in (0, 1)]

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        numbers = self.numbers(image)
        corners = [(y * PATCH, x * PATCH) for y, x in self.squares(image)]
        return torch.stack([numbers[:, y : y + PATCH, x : x + PATCH].flatten(1) for y, x in corners]).numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        return torch.cat([self.seen(image) for image in images])

    def seen(self, image: Image.Image) -> Tensor:
        embedded, places = self.proj(self.numbers(image)[None])[0], self.squares(image)
        x = self.norm(torch.stack([embedded[:, row, column] for row, column in places]))
        pairs = WIDTH // HEADS // 4
        frequencies = 10000.0 ** -(torch.arange(pairs) / pairs)
        turned = [torch.cat([row * frequencies, column * frequencies]) for row, column in places]
        angles = torch.stack(turned).repeat(1, 2)[:, None]
        for block in self.blocks:
            x = block(x, angles)
        features: Tensor = self.mlp(self.ln_q(self.post_trunk_norm(x)).view(-1, 4 * WIDTH))
        return features
