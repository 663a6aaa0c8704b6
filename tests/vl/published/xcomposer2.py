"""InternLM-XComposer2: transformers' Llama, with low-rank additions for images' rows, and CLIP; tiles as published
code joins them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.remote_layouts import LAYOUTS
from tests.vl.published.model import PublishedModel, normalized
from tests.vl.tiny_parts import CLIP, TEXT

__all__ = ["XComposer2", "XComposer24khd", "XComposer25"]

SIDE, RANK = CLIP["image_size"], 256
GRID = SIDE // CLIP["patch_size"]
_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"}


class _PartialLora(nn.Module):
    """Rows of images have B A x times the scale besides. Which these are is written ahead of a call."""

    def __init__(self, plain: nn.Linear, a: nn.Linear, scale: float) -> None:
        super().__init__()
        self.plain, self.Plora_A = plain, a
        self.Plora_B = nn.Linear(a.out_features, plain.out_features, bias=False)
        self.scale = scale
        self.seen = torch.zeros(0, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.Plora_B(self.Plora_A(x)) * self.scale * self.seen[:, None]


class XComposer2(PublishedModel):
    architecture = "InternLMXComposer2ForCausalLM"
    oracle = "`LlamaForCausalLM` with low-rank additions, `CLIPVisionModel`, and the rest in plain torch"
    attention = (RANK, 1.0)
    width = CLIP["hidden_size"]
    code = ""
    fields = {**_TEXT, "model_type": "internlmxcomposer2", "bias": False, "img_size": SIDE, "vision_config": CLIP}
    tokens = ["<image>"]

    def __init__(self) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

        super().__init__()
        hidden = TEXT["hidden_size"]
        self.decoder = LlamaForCausalLM(LlamaConfig(**_TEXT))
        self.typed: list[_PartialLora] = []
        for layer in self.decoder.model.layers:
            rank, scale = self.attention
            shared = nn.Linear(hidden, rank, bias=False)
            for name in ("q_proj", "k_proj", "v_proj"):
                self._wrap(layer.self_attn, name, shared, scale)
            self._wrap(layer.self_attn, "o_proj", nn.Linear(32, RANK, bias=False), 1.0)
            for name in ("gate_proj", "up_proj", "down_proj"):
                width = getattr(layer.mlp, name).in_features
                self._wrap(layer.mlp, name, nn.Linear(width, RANK, bias=False), 1.0)
        self.tower = CLIPVisionModel(CLIPVisionConfig(**CLIP))
        self.vision_proj = nn.Sequential(nn.Linear(self.width, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def _wrap(self, parent: Any, name: str, a: nn.Linear, scale: float) -> None:
        typed = _PartialLora(getattr(parent, name), a, scale)
        setattr(parent, name, typed)
        self.typed.append(typed)

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        parts: dict[str, dict[str, Tensor]] = {".plain": {}, ".Plora_A": {}, ".Plora_B": {}}
        found, plain = dict[str, Tensor](), parts[".plain"]
        for name, tensor in state.items():
            if name.startswith("decoder."):
                kind = next((each for each in parts if each in name), "")
                own = name.removeprefix("decoder.").replace(kind, "") if kind else name.removeprefix("decoder.")
                parts.get(kind, plain)[own] = tensor
            else:
                found[name.replace("tower.", "vit.vision_tower.vision_model.", 1)] = tensor
        rename = LAYOUTS["internlm2"].rename
        # All of queries, keys and values have one A.
        first = {
            name.replace("self_attn.q_proj", "attention.wqkv"): tensor
            for name, tensor in parts[".Plora_A"].items()
            if "k_proj" not in name and "v_proj" not in name
        }
        for kind, tensors in ((".Plora_A", rename(first, dict(_TEXT))), (".Plora_B", rename(parts[".Plora_B"], _TEXT))):
            found |= {name.replace(".weight", f"{kind}.weight"): tensor for name, tensor in tensors.items()}
        return {**found, **rename(plain, dict(_TEXT))}

    def type_tokens(self, shown: Sequence[bool]) -> None:
        for typed in self.typed:
            typed.seen = torch.tensor(list(shown))

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return normalized(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))[None].numpy()

    def patches(self, pixels: NDArray[Any]) -> Tensor:
        hidden: Tensor = self.tower(torch.from_numpy(pixels), output_hidden_states=True).hidden_states[-1][:, 1:]
        return hidden

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        found: Tensor = self.vision_proj(torch.cat([self.patches(self.pixels(image))[0] for image in images]))
        return found


class XComposer24khd(XComposer2):
    oracle = "the same with tiles"
    attention = (8, 2.0)
    width = 4 * CLIP["hidden_size"]
    most, few = 25, 25
    sparing = False
    code = "def HD_transform(img, hd_num=16):\n    pass\n"

    def __init__(self) -> None:
        super().__init__()
        self.plora_glb_GN = nn.Parameter(torch.empty(1, 1, self.width))
        self.plora_sub_GN = nn.Parameter(torch.empty(1, 1, 1, self.width))

    def canvas(self, image: Image.Image, most: int) -> Image.Image:
        tall = image.width < image.height
        image = image.transpose(Image.Transpose.TRANSPOSE) if tall else image
        width, height = image.size
        scale = max(each for each in range(1, most + 1) if each * np.ceil(each / (width / height)) <= most)
        if self.sparing:
            scale = int(min(np.ceil(width / SIDE), scale))
        new_width = scale * SIDE
        new_height = int(new_width / (width / height))
        rows = int(np.ceil(new_height / SIDE))
        whole = Image.new("RGB", (new_width, rows * SIDE), (255, 255, 255))
        scaled = image.resize((new_width, new_height), Image.Resampling.BILINEAR)
        whole.paste(scaled, (0, int((rows * SIDE - new_height) / 2)))
        return whole.transpose(Image.Transpose.TRANSPOSE) if tall else whole

    def cut(self, image: Image.Image, most: int) -> tuple[Tensor, int, int]:
        numbers = normalized(self.canvas(image, most))
        down, across = numbers.shape[1] // SIDE, numbers.shape[2] // SIDE
        tiles = numbers.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE).permute(1, 2, 0, 3, 4).flatten(0, 1)
        small = F.interpolate(numbers[None], size=(SIDE, SIDE), mode="bicubic")
        return torch.cat([small, tiles]), down, across

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return self.cut(image, self.most)[0].numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        rows = []
        for image in images:
            pixels, down, across = self.cut(image, self.most if len(images) == 1 else self.few)
            patches = self.patches(pixels.numpy()).view(-1, GRID, GRID, CLIP["hidden_size"])
            picture = torch.cat([torch.cat([*patches[1 + y * across :][:across]], 1) for y in range(down)])
            for each in (patches[0], None, picture):
                if each is None:
                    rows.append(self.plora_glb_GN[0])
                    continue
                for y in range(0, len(each), 2):
                    rows += [each[y : y + 2, x : x + 2].reshape(1, -1) for x in range(0, each.shape[1], 2)]
                    rows.append(self.plora_sub_GN[0, 0])
        found: Tensor = self.vision_proj(torch.cat(rows))
        return found


class XComposer25(XComposer24khd):
    attention = (RANK, 1.0)
    most, few = 24, 6
    sparing = True
    code = "def Image_transform(img, hd_num=24):\n    pass\n"
