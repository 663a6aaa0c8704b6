"""The tower of PaddleOCR-VL (Cui et al., 2025): SigLIP over images of any size, whose patches have stretched learned
positions and are turned by their row and column; squares of them become a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels import split_segments
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import PlannedTower, Shown
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table
from asyncllm.vl.towers.patches import PatchesConfig, stretched
from asyncllm.vl.towers.qwen_vl import PatchBlock, grids_of, in_time, pixels_of, square_places, square_rotation

__all__ = ["PaddleOCRVLConfig", "PaddleOCRVLTower"]

MERGER_EPS = 1e-5


class PaddleOCRVLConfig(PatchesConfig, frozen=True, kw_only=True):
    eps: float
    side: int
    """Of the square grid of learned positions, which is stretched over an image."""

    def build(self, hidden_size: int) -> PaddleOCRVLTower:
        return PaddleOCRVLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        source = "visual.vision_model"
        block, own = f"{source}.encoder.layers.{{i}}", "vision.layers.{i}"
        rows = {
            f"{source}.embeddings.patch_embedding": "vision.patches",
            f"{source}.embeddings.position_embedding": "vision.positions",
            f"{block}.layer_norm1": f"{own}.attn_norm",
            **{f"{block}.self_attn.{name}_proj": f"{own}.qkv[{name}]" for name in "qkv"},
            f"{block}.self_attn.out_proj": f"{own}.out",
            f"{block}.layer_norm2": f"{own}.mlp_norm",
            f"{block}.mlp.fc1": f"{own}.up",
            f"{block}.mlp.fc2": f"{own}.down",
            f"{source}.post_layernorm": "vision.last_norm",
        }
        joined = {"pre_norm": "vision.norm", "linear_1": "vision.projector_1", "linear_2": "vision.projector_2"}
        return rows | {f"{part}.{name}": target for part in ("mlp_AR", "projector") for name, target in joined.items()}

    @property
    def unused(self) -> Sequence[str]:
        return [f"visual.vision_model.{name}" for name in ("head", "embeddings.packing_position_embedding")]


class PaddleOCRVLTower(PlannedTower):
    def __init__(self, config: PaddleOCRVLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, square = config.hidden_size, config.hidden_size * config.merge**2
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(config.side**2, size)
        self.layers = nn.ModuleList(
            PatchBlock(
                size,
                config.intermediate_size,
                config.num_heads,
                norm=LayerNorm,
                activation=config.activation,
                gated=False,
                eps=config.eps,
            )
            for _ in range(config.num_layers)
        )
        self.last_norm, self.norm = LayerNorm(size, config.eps), LayerNorm(size, MERGER_EPS)
        self.projector_1, self.projector_2 = Dense(square, square), Dense(square, hidden_size)

    def show(self, images: Sequence[PromptImage]) -> Shown:
        device, grids, merge = self.positions.weight.device, grids_of(images), self.config.merge
        lengths = [rows * columns * merge**2 for rows, columns in grids]
        sizes = torch.tensor(grids).repeat_interleave(torch.tensor(lengths), 0) * merge
        tensors = (pixels_of(images, self.config.frames), square_places(grids, merge), sizes)
        return Shown(tuple(each.to(device) for each in tensors), (split_segments(lengths, device),))

    def look(self, shown: Shown) -> Tensor:
        config = self.config
        (pixels, places, sizes), (whole,) = shown
        x = self.patches(in_time(pixels, config.frames))
        x = x + stretched(self.positions(), places.flatten(0, 1), sizes, "bilinear").to(x.dtype)
        rotation = square_rotation(places, config.hidden_size // config.num_heads)
        for layer in self.layers:
            x = layer(x, rotation, whole)
        merged = self.norm(self.last_norm(x)).view(-1, config.hidden_size * config.merge**2)
        features: Tensor = self.projector_2(F.gelu(self.projector_1(merged)))
        return features
