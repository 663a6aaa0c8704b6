"""EVA2-CLIP in plain torch, and GLM-4V, which is transformers' GLM behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.remote_layouts import LAYOUTS
from tests.vl.published.model import PublishedModel, normalized
from tests.vl.tiny_parts import IMAGE_ID, TEXT

__all__ = ["Eva", "Glm4v9b", "shared_positions", "squeezed"]

WIDTH, SIDE, PATCH = 24, 42, 7
TOWER = {
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "in_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "num_positions": (SIDE // PATCH) ** 2 + 1,
    "dropout_prob": 0.0,
}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * (WIDTH // 2) ** -0.5).softmax(-1)
        out: Tensor = self.dense((scores @ v).transpose(1, 2).flatten(2))
        return out


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attention = _Attention()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 40), "fc2": nn.Linear(40, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.input_layernorm(self.attention(x))
        return x + self.post_attention_layernorm(self.mlp["fc2"](F.gelu(self.mlp["fc1"](x))))


class Eva(nn.Module):
    def __init__(self, hidden: int, inner: int, folded: int | None, divisor: float) -> None:
        super().__init__()
        self.patch_embedding = nn.Module()
        self.patch_embedding.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.patch_embedding.cls_embedding = nn.Parameter(torch.empty(1, WIDTH))
        self.patch_embedding.position_embedding = nn.Embedding(TOWER["num_positions"], WIDTH)
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(_Layer() for _ in range(3))})
        self.conv = None if folded is None else nn.Conv2d(WIDTH, folded, 2, 2)
        self.linear_proj = nn.ModuleDict(
            {
                "linear_proj": nn.Linear(folded or WIDTH, hidden, bias=False),
                "norm1": nn.LayerNorm(hidden),
                "dense_h_to_4h": nn.Linear(hidden, inner, bias=False),
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "dense_4h_to_h": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.boi, self.eoi = (nn.Parameter(torch.empty(1, 1, hidden)) for _ in range(2))
        self.divisor = divisor

    def forward(self, pixels: Tensor) -> Tensor:
        embedding: Any = self.patch_embedding
        x = embedding.proj(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([embedding.cls_embedding.expand(len(x), 1, -1), x], 1) + embedding.position_embedding.weight
        for layer in self.transformer["layers"]:  # type: ignore[attr-defined]
            x = layer(x)
        x = x[:, 1:]
        if self.conv is not None:
            side = SIDE // PATCH
            x = self.conv(x.transpose(1, 2).reshape(len(x), WIDTH, side, side)).flatten(2).transpose(1, 2)
        parts = self.linear_proj
        x = F.gelu(parts["norm1"](parts["linear_proj"](x)))
        x = parts["dense_4h_to_h"](F.silu(parts["gate_proj"](x)) * parts["dense_h_to_4h"](x))
        ends = (each.expand(len(x), -1, -1) for each in (self.boi, self.eoi))
        return torch.cat([next(ends), x, next(ends)], 1) / self.divisor


def squeezed(image: Image.Image) -> Tensor:
    return normalized(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def shared_positions(shown: Sequence[bool], length: int) -> Tensor:
    """Return the tokens' positions [1, T]: those of an image of this length share one, but for its first and last."""
    positions, following, inside = [], 0, 0
    for image in shown:
        if image and 1 < inside < length - 1:
            positions.append(following - 1)
        else:
            positions.append(following)
            following += 1
        inside = (inside + 1) % length if image else 0
    return torch.tensor([positions])


_TEXT = {
    "padded_vocab_size": TEXT["vocab_size"],
    "hidden_size": TEXT["hidden_size"],
    "ffn_hidden_size": TEXT["intermediate_size"],
    "num_layers": 2,
    "num_attention_heads": 2,
    "multi_query_attention": True,
    "multi_query_group_num": 1,
    "kv_channels": 16,
    "seq_length": 512,
    "layernorm_epsilon": 1e-5,
    "rope_ratio": 0.5,
    "add_qkv_bias": True,
    "add_bias_linear": False,
}


class Glm4v9b(PublishedModel):
    architecture = "ChatGLMModel"
    also = ("ChatGLMForConditionalGeneration",)
    oracle = "`GlmForCausalLM`, and the tower in plain torch"
    fields = {
        **_TEXT,
        "model_type": "chatglm",
        "bos_token_id": 1,
        "eos_token_id": 3,
        "boi_token_id": IMAGE_ID,
        "eoi_token_id": IMAGE_ID + 1,
        "vision_config": {**TOWER, "scaling_factor": 8},
    }
    tokens = ["<|begin_of_image|>", "<|end_of_image|>"]

    def __init__(self) -> None:
        from transformers import GlmConfig, GlmForCausalLM

        super().__init__()
        layout = LAYOUTS["chatglm"]
        own = {"hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False, "attention_bias": True}
        native = {name: _TEXT[key] for key, name in layout.words.items()}
        self.decoder = GlmForCausalLM(GlmConfig(**own, **native, **layout.rope(_TEXT), pad_token_id=0))
        self.vision = Eva(32, TEXT["intermediate_size"], folded=32, divisor=8)

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        text = {name.removeprefix("decoder."): each for name, each in state.items() if name.startswith("decoder.")}
        found = LAYOUTS["chatglm"].rename(text, dict(_TEXT))
        return {**found, **{f"transformer.{name}": each for name, each in state.items() if name.startswith("vision.")}}

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return squeezed(image)[None].numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        found: Tensor = self.vision(torch.stack([squeezed(image) for image in images]))
        return found.flatten(0, 1)

    def positions(self, shown: Sequence[bool]) -> Tensor:
        return shared_positions(shown, (SIDE // PATCH // 2) ** 2 + 2)
