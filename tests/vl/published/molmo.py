"""Molmo: transformers' Qwen2 or OLMo 2 and CLIP, with crops, pooling and the order of tokens as the published code has
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.model import CLIP_MEAN, CLIP_STD, PublishedModel
from tests.vl.tiny_parts import CLIP, TEXT

__all__ = ["MolmoD", "MolmoO"]

PATCH, PATCHES, MARGINS, MOST, LAYERS = 4, 8, (2, 2), 5, 9
SIDE, STEP = PATCH * PATCHES, PATCHES - sum(MARGINS)
WIDTH, HEADS, INNER = CLIP["hidden_size"], CLIP["num_attention_heads"], 48
_TOWER = {**CLIP, "image_size": SIDE, "patch_size": PATCH, "num_hidden_layers": LAYERS}
_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"}
START, END, SQUARE, ROW_END = 0, 1, 2, 3
"""Rows of the embeddings behind the vocabulary's."""

_DECODER = {
    "model.embed_tokens.weight": "model.transformer.wte.embedding",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "model.layers.": "model.transformer.blocks.",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.down_proj": "ff_out",
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"}
_NORMS_BEHIND = {"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "ff_norm"}
_VIT = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.patch_embedding": "patch_embedding",
    "pre_layrnorm": "pre_ln",
    "encoder.layers.": "transformer.resblocks.",
    "layer_norm1": "attention_norm",
    "layer_norm2": "ffn_norm",
    "mlp.fc1": "feed_forward.w1",
    "mlp.fc2": "feed_forward.w2",
    **{f"self_attn.{name}_proj": f"attention.w{name}" for name in "qkv"},
    "self_attn.out_proj": "attention.wo",
}


def _triangles(length: int, new: int) -> Tensor:
    """Return what each of `new` numbers takes of `length` ones, as torch's antialiased bilinear resizing does; which
    itself is wrong for a picture of one column."""
    ratio = length / new
    centers, places = (torch.arange(new, dtype=torch.float64) + 0.5) * ratio, torch.arange(length) + 0.5
    weights = (1 - (places - centers[:, None]).abs() / max(ratio, 1.0)).clip(min=0)
    return weights / weights.sum(1, keepdim=True)


class MolmoD(PublishedModel):
    architecture = "MolmoForCausalLM"
    oracle = "`Qwen2ForCausalLM`, `CLIPVisionModel`, and the rest in plain torch"
    fields = {
        **{key: value for key, value in _TEXT.items() if key not in ("vocab_size", "intermediate_size")},
        "model_type": "molmo",
        "vocab_size": TEXT["vocab_size"] - 3,
        "embedding_size": TEXT["vocab_size"],
        "intermediate_size": 2 * TEXT["intermediate_size"],
        "layer_norm_type": "rms",
        "layer_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "qkv_bias": True,
        "norm_after": False,
        "attention_layer_norm": False,
        "weight_tying": False,
        "clip_qkv": None,
        "vision_config": _TOWER,
    }
    pictures = {
        "image_processor_type": "MolmoImageProcessor",
        "base_image_input_size": [SIDE, SIDE],
        "max_crops": MOST,
        "overlap_margins": list(MARGINS),
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_padding_mask": True,
    }
    tokens = ["<image>"]
    files = {
        "added_tokens.json": {
            f"<im_{name}>": TEXT["vocab_size"] + index for index, name in enumerate(("start", "end", "patch", "col"))
        }
    }
    norms = _NORMS

    def __init__(self) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel

        super().__init__()
        self.decoder = self.made_decoder()
        self.tower = CLIPVisionModel(CLIPVisionConfig(**_TOWER))
        self.pad_embed = nn.Parameter(torch.empty(2, 2 * WIDTH))
        self.new_embedding = nn.Parameter(torch.empty(128, TEXT["hidden_size"]))
        self.pool = nn.ModuleDict({f"w{name}": nn.Linear(2 * WIDTH, WIDTH) for name in "qkv"})
        self.pool["wo"] = nn.Linear(WIDTH, WIDTH)
        self.project = nn.ModuleDict({name: nn.Linear(WIDTH, INNER, bias=False) for name in ("w1", "w3")})
        self.project["w2"] = nn.Linear(INNER, TEXT["hidden_size"], bias=False)

    def made_decoder(self) -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        rope = {"rope_type": "default", "rope_theta": 5000.0}
        return Qwen2ForCausalLM(Qwen2Config(**_TEXT, rope_parameters=rope, tie_word_embeddings=False))

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {"pad_embed": "vision_backbone.pad_embed", "new_embedding": "transformer.wte.new_embedding"}
        own |= {"pool.": "vision_backbone.image_pooling_2d.", "project.": "vision_backbone.image_projector."}
        found: dict[str, Tensor] = {}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            if "q_proj" in rest and part == "decoder":
                joined = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
                found[self.of_decoder(rest.replace("self_attn.q_proj", "att_proj"))] = torch.cat(joined)
            elif "gate_proj" in rest:
                joined = [state[name.replace("gate_proj", "up_proj")], tensor]
                found[self.of_decoder(rest.replace("mlp.gate_proj", "ff_proj"))] = torch.cat(joined)
            elif part == "decoder" and not any(f"{each}_proj" in rest for each in ("k", "v", "up")):
                found[self.of_decoder(rest)] = tensor
            elif part == "tower" and "post_layernorm" not in rest:
                if "patch_embedding" in rest:
                    tensor = tensor.permute(0, 2, 3, 1).flatten(1)
                for theirs, published in _VIT.items():
                    rest = rest.replace(theirs, published)
                found[f"model.vision_backbone.image_vit.{rest}"] = tensor
            else:
                for theirs, published in own.items():
                    if name.startswith(theirs):
                        found[f"model.{published}{name.removeprefix(theirs)}"] = tensor
        return found

    def of_decoder(self, name: str) -> str:
        for theirs, published in {**_DECODER, **self.norms}.items():
            name = name.replace(theirs, published)
        return name

    def placed(self, image: Image.Image, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return numbers [height, width, 3], and which of them are of the image."""
        scale = min(np.float32(width) / np.float32(image.width), np.float32(height) / np.float32(image.height))
        size = [max(1, int(np.float32(each) * scale)) for each in (image.height, image.width)]
        floats = torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255
        down, across = (_triangles(*each) for each in zip(floats.shape[1:], size, strict=True))
        scaled = (down @ floats @ across.T).float()
        top, left = (height - size[0]) // 2, (width - size[1]) // 2
        around = (left, width - size[1] - left, top, height - size[0] - top)
        numbers = (F.pad(scaled, around).permute(1, 2, 0) - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)
        return numbers, F.pad(torch.ones(size), around)

    def tiling(self, image: Image.Image) -> tuple[int, int]:
        margin = sum(MARGINS) * PATCH
        shapes = sorted(
            ((i, j) for i in range(1, MOST + 1) for j in range(1, MOST + 1) if i * j <= MOST),
            key=lambda each: (each[0] * each[1], each[0]),
        )
        inner = np.array([image.height - margin, image.width - margin], np.float32)
        with np.errstate(divide="ignore"):
            scales = (np.array(shapes, np.float32) * STEP * PATCH / inner).min(-1)
        if (scales < 1).all():
            return shapes[int(scales.argmax())]
        return shapes[int(np.where(scales < 1, 10e9, scales).argmin())]

    def crops(self, image: Image.Image) -> tuple[list[Tensor], list[Tensor]]:
        """Return the numbers of the whole and of each crop, and the shares of the crops' patches."""
        rows, columns = self.tiling(image)
        margin, step = sum(MARGINS) * PATCH, STEP * PATCH
        numbers, inside = self.placed(image, rows * step + margin, columns * step + margin)
        cut = [(y * step, x * step) for y in range(rows) for x in range(columns)]
        patches = [inside[y : y + SIDE, x : x + SIDE].unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH) for y, x in cut]
        return (
            [self.placed(image, SIDE, SIDE)[0], *(numbers[y : y + SIDE, x : x + SIDE] for y, x in cut)],
            [each.mean((-1, -2)).flatten() for each in patches],
        )

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return torch.stack(self.crops(image)[0]).permute(0, 3, 1, 2).numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        return torch.cat([self.seen(image) for image in images])

    def seen(self, image: Image.Image) -> Tensor:
        crops, shares = self.crops(image)
        # Shares are aligned with the whole and all crops but the last one, for which there is a number below 0.
        shares = [*shares, torch.full_like(shares[0], -1)]
        pooled = [self.pooled(crop, share) for crop, share in zip(crops, shares, strict=True)]
        rows, columns = self.tiling(image)
        half = PATCHES // 2
        found = self.framed([[pooled[0][y * half + x] for x in range(half)] for y in range(half)])
        # Each crop's own tokens get numbers, which are read again line by line of the whole.
        numbers, owners = np.full((rows, columns, half, half), -1), []
        for i in range(rows):
            for j in range(columns):
                places = []
                for number, count in ((i, rows), (j, columns)):
                    first = 0 if number == 0 else MARGINS[0] // 2
                    long = STEP + (MARGINS[0] if number == 0 else 0) + (MARGINS[1] if number == count - 1 else 0)
                    places.append(range(first, first + (long + 1) // 2))
                for y in places[0]:
                    for x in places[1]:
                        numbers[i, j, y, x] = len(owners)
                        owners.append(pooled[1 + i * columns + j][y * half + x])
        read = [number for number in numbers.transpose(0, 2, 1, 3).reshape(-1) if number >= 0]
        across = (columns * STEP + sum(MARGINS) + 1) // 2
        lines = [[owners[number] for number in read[at : at + across]] for at in range(0, len(read), across)]
        return torch.cat([found, self.framed(lines)])

    def framed(self, lines: list[list[Tensor]]) -> Tensor:
        rows = [self.new_embedding[START]]
        for line in lines:
            rows += [self.new_embedding[SQUARE] + each for each in line]
            rows.append(self.new_embedding[ROW_END])
        return torch.stack([*rows, self.new_embedding[END]])

    def pooled(self, crop: Tensor, share: Tensor) -> Tensor:
        """Square by square."""
        hidden = self.tower(crop.permute(2, 0, 1)[None], output_hidden_states=True).hidden_states
        x = torch.cat([hidden[LAYERS - 1][0, 1:], hidden[LAYERS - 8][0, 1:]], -1)
        x = x + self.pad_embed[0] * (share == 0)[:, None] + self.pad_embed[1] * ((share < 1) & (share != 0))[:, None]
        grid, found = x.view(PATCHES, PATCHES, -1), []
        for y in range(0, PATCHES, 2):
            for x_ in range(0, PATCHES, 2):
                square = grid[y : y + 2, x_ : x_ + 2].flatten(0, 1)
                q = self.pool["wq"](square.mean(0)).view(HEADS, -1)
                k, v = (self.pool[name](square).view(4, HEADS, -1) for name in ("wk", "wv"))
                weights = (torch.einsum("hd,thd->ht", q, k) * (WIDTH // HEADS) ** -0.5).softmax(-1)
                out = self.pool["wo"](torch.einsum("ht,thd->hd", weights, v).flatten())
                found.append(self.project["w2"](F.silu(self.project["w1"](out)) * self.project["w3"](out)))
        return torch.stack(found)


class MolmoO(MolmoD):
    """Norms behind attention and MLP, and of queries and keys."""

    oracle = "the same with `Olmo2ForCausalLM`"
    fields = {**MolmoD.fields, "qkv_bias": False, "norm_after": True, "attention_layer_norm": True}
    norms = _NORMS_BEHIND

    def made_decoder(self) -> nn.Module:
        from transformers import Olmo2Config, Olmo2ForCausalLM

        rope = {"rope_type": "default", "rope_theta": 5000.0}
        config = Olmo2Config(**_TEXT, rms_norm_eps=1e-6, rope_parameters=rope, tie_word_embeddings=False)
        return Olmo2ForCausalLM(config)
