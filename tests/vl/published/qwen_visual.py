"""Qwen-VL: transformers' Qwen2 under the names of the first generation, behind the tower in plain torch."""

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

__all__ = ["QwenVisual"]

WIDTH, HEADS, PATCH, SIDE, HIDDEN, QUERIES = 24, 2, 4, 80, 256, 256


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = nn.ModuleDict({"in_proj": nn.Linear(WIDTH, 3 * WIDTH), "out_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 40), "c_proj": nn.Linear(40, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        # Each head has its query, key and value one after the other.
        q, k, v = self.attn["in_proj"](self.ln_1(x)).view(*x.shape[:2], HEADS, -1).transpose(1, 2).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        x = x + self.attn["out_proj"]((scores @ v).transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class _Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.pos_embed = (nn.Parameter(torch.empty(QUERIES, HIDDEN)) for _ in range(2))
        self.kv_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.attn = nn.MultiheadAttention(HIDDEN, HIDDEN // 128, batch_first=True)
        self.ln_q, self.ln_kv = nn.LayerNorm(HIDDEN, eps=1e-6), nn.LayerNorm(HIDDEN, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        values = self.ln_kv(self.kv_proj(x))
        queries = (self.ln_q(self.query) + self.pos_embed).expand(len(x), -1, -1)
        out: Tensor = self.attn(queries, values + _stretched(self.pos_embed), values, need_weights=False)[0]
        return out


def _stretched(positions: Tensor) -> Tensor:
    grid = positions.view(1, 16, 16, -1).permute(0, 3, 1, 2)
    return F.interpolate(grid, (SIDE // PATCH, SIDE // PATCH), mode="bicubic").flatten(2)[0].T


class _Visual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.positional_embedding = nn.Parameter(torch.empty(256, WIDTH))
        self.ln_pre = nn.LayerNorm(WIDTH, eps=1e-6)
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(_Layer() for _ in range(2))})
        self.attn_pool, self.ln_post = _Pool(), nn.LayerNorm(HIDDEN, eps=1e-6)
        self.proj = nn.Parameter(torch.empty(HIDDEN, HIDDEN))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.ln_pre(self.conv1(pixels).flatten(2).transpose(1, 2) + _stretched(self.positional_embedding))
        for layer in self.transformer["resblocks"]:  # type: ignore[attr-defined]
            x = layer(x)
        return self.ln_post(self.attn_pool(x)) @ self.proj


_TEXT = {
    "vocab_size": TEXT["vocab_size"],
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_channels": 128,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 5000.0,
}


class QwenVisual(PublishedModel):
    architecture = "QWenLMHeadModel"
    oracle = "`Qwen2ForCausalLM`, and the tower in plain torch"
    fields = {
        **_TEXT,
        "model_type": "qwen",
        "no_bias": True,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "tie_word_embeddings": False,
        "visual": {
            "heads": HEADS,
            "image_size": SIDE,
            "image_start_id": IMAGE_ID - 2,
            "layers": 2,
            "mlp_ratio": 40 / 24,
            "output_dim": HIDDEN,
            "patch_size": PATCH,
            "width": WIDTH,
        },
    }
    tokens = ["<imgpad>", "<img>", "</img>"]

    def __init__(self) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        super().__init__()
        own = {key: value for key, value in _TEXT.items() if key not in ("kv_channels", "seq_length")}
        del own["layer_norm_epsilon"], own["rotary_emb_base"]
        own |= {"intermediate_size": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "head_dim": 128}
        rope = {"rope_type": "default", "rope_theta": 5000.0}
        self.decoder = Qwen2ForCausalLM(Qwen2Config(**own, rope_parameters=rope, tie_word_embeddings=False))
        self.visual = _Visual()

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        text = {name.removeprefix("decoder."): each for name, each in state.items() if name.startswith("decoder.")}
        visual = {f"transformer.{name}": each for name, each in state.items() if name.startswith("visual.")}
        return {**LAYOUTS["qwen"].rename(text, dict(_TEXT)), **visual}

    def numbers(self, image: Image.Image) -> Tensor:
        return normalized(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))[None]

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return self.numbers(image).numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        found: Tensor = self.visual(torch.cat([self.numbers(image) for image in images]))
        return found.flatten(0, 1)
