"""LLaVA's tower (Liu et al., 2023), also that of DeepSeek-VL and Janus: an encoder's hidden states and an MLP to the
decoder's width.

LLaVA-NeXT encodes the whole image and its tiles. The tiles' features are joined to one picture, cropped to the part
that is not padding, and each row gets a learned newline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.processing.anyres import grid_of, shrunk, unpadded
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights, timm_weights
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, Table, TowerActivation, join_tiles, with_row_ends
from asyncllm.vl.towers.uploads import upload

__all__ = ["LlavaConfig", "LlavaTower"]

TIMM = "vision_model.vision_tower"
"""The module of DeepSeek-VL's encoder in the authors' checkpoints."""

DRAWING = (
    *("vqmodel", "generation_embeddings", "generation_aligner", "generation_head"),
    *("gen_vision_model", "gen_aligner", "gen_head", "gen_embed"),
)
"""The modules with which Janus generates images, in transformers' and the authors' checkpoints."""


class LlavaConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and a projector."""

    encoder: ClipConfig
    feature_layers: tuple[int, ...]
    """Numbers of layers after which hidden states are read and concatenated."""
    drops_class_token: bool
    bias: bool
    activation: TowerActivation
    source: str = "vision_tower"
    """The checkpoint's module that holds the encoder."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """Possible heights and widths of tiled images (LLaVA-NeXT), or empty without tiles."""
    projector_norms: bool = False
    """Whether a norm follows each linear layer of the projector (Yi-VL)."""
    input_eps: float | None = None
    """Epsilon of a norm before the projector, or None without one (ViP-LLaVA has one)."""
    max_patches: int | None = None
    """Maximum number of patches of all tiles, as in `anyres.shrunk`."""

    def build(self, hidden_size: int) -> LlavaTower:
        return LlavaTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        names = ("multi_modal_projector.linear_", "aligner.linear")
        projector = {f"{name}{n}": f"vision.projector_{n}" for name in names for n in (1, 2)}
        projector |= {"aligner.layers.0": "vision.projector_1", "aligner.layers.2": "vision.projector_2"}
        projector |= {"aligner.fc1": "vision.projector_1", "aligner.hidden_layers.0": "vision.projector_2"}
        projector |= {"vision_proj.0": "vision.projector_1", "vision_proj.2": "vision.projector_2"}
        projector |= {"mm_projector.0": "vision.projector_1"}
        if self.projector_norms:
            own = {"1": "vision.norm_1", "3": "vision.projector_2", "4": "vision.norm_2"}
        else:
            own = {"2": "vision.projector_2"}
        projector |= {f"mm_projector.{number}": target for number, target in own.items()}
        return {
            **{
                row: target
                for source in self._sources
                for row, target in clip_weights(source, "vision.encoder").items()
            },
            **timm_weights(TIMM, "vision.encoder"),
            **projector,
            "multi_modal_projector.projector_layernorm": "vision.input_norm",
            "image_newline": "vision.newline:weight",
        }

    @property
    def unused(self) -> Sequence[str]:
        norm = () if self.encoder.final_norm else ("post_layernorm",)
        names = (*norm, "head", "embeddings.position_ids")
        return [f"{source}.{name}" for source in self._sources for name in names] + [f"{TIMM}.attn_pool", *DRAWING]

    @property
    def _sources(self) -> tuple[str, str]:
        return self.source, f"{self.source}.vision_model"


class LlavaTower(VisionTower):
    def __init__(self, config: LlavaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClipEncoder(config.encoder)
        width = config.encoder.hidden_size * len(config.feature_layers)
        self.projector_1 = Dense(width, hidden_size, bias=config.bias)
        self.projector_2 = Dense(hidden_size, hidden_size, bias=config.bias)
        self.input_norm = None if config.input_eps is None else LayerNorm(width, config.input_eps)
        norms = config.projector_norms
        self.norm_1 = LayerNorm(hidden_size, 1e-5) if norms else None
        self.norm_2 = LayerNorm(hidden_size, 1e-5) if norms else None
        self.newline = Table(hidden_size) if config.pinpoints else None

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        parameter = self.projector_1.weight
        # A video's pixels are [1, frames, ...].
        tiles = [torch.from_numpy(image.pixels).flatten(0, -4) for image in images]
        features = self._features(upload(torch.cat(tiles).to(parameter.dtype), parameter.device))
        return [
            self._joined(part, image)
            for part, image in zip(torch.split(features, [len(each) for each in tiles]), images, strict=True)
        ]

    def _features(self, pixels: Tensor) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N, patches, hidden]."""
        config = self.config
        hidden = self.encoder.several(pixels, config.feature_layers)
        x = torch.cat([each[:, 1:] if config.drops_class_token else each for each in hidden], -1)
        x = self.projector_1(x if self.input_norm is None else self.input_norm(x))
        x = self.projector_2(ACTIVATIONS[config.activation](x if self.norm_1 is None else self.norm_1(x)))
        projected: Tensor = x if self.norm_2 is None else self.norm_2(x)
        return projected

    def _joined(self, features: Tensor, image: PromptImage) -> Tensor:
        """Join features [tiles, patches, hidden] of an image's tiles or a video's frames to [length, hidden]."""
        if self.newline is None:
            return features[0]
        side = self.config.encoder.side
        if image.pixels.ndim == 5:
            half = -(-side // 2)
            squares = features.transpose(1, 2).reshape(len(features), -1, side, side)
            frames = F.interpolate(squares, (half, half), mode="bilinear")
            return torch.cat([frames.flatten(2).transpose(1, 2).flatten(0, 1), self.newline()[None]])
        if len(features) == 1:
            return torch.cat([features[0], self.newline()[None]])
        rows, columns = grid_of(image.size, self.config.pinpoints, self.config.encoder.image_size)
        picture = join_tiles(features[1:], rows, columns)
        top, left, height, width = unpadded(image.size, (rows * side, columns * side))
        picture = picture[top : top + height, left : left + width]
        size = shrunk((height, width), self.config.max_patches)
        if size != (height, width):
            stretched = F.interpolate(picture.permute(2, 0, 1)[None], size, mode="bilinear")
            picture = stretched[0].permute(1, 2, 0)
        return torch.cat([features[0], with_row_ends(picture, self.newline())])
