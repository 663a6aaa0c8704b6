"""The tower of MGM (Li et al., 2024): CLIP over a small and ConvNeXt over a large version of a picture. Each patch of
the former attends to the latter's cells at its position ("patch info mining"), and an MLP projects the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights
from asyncllm.vl.towers.convnext import ConvNextConfig, ConvNextEncoder, convnext_weights
from asyncllm.vl.towers.parts import Dense
from asyncllm.vl.towers.uploads import upload

__all__ = ["MgmConfig", "MgmTower"]

EPS = 1e-5
SMALL, LARGE = "vision_tower.vision_tower", "vision_tower_aux"


class MgmConfig(TowerConfig, frozen=True, kw_only=True):
    """The two encoders and the small one's tiles."""

    small: ClipConfig
    large: ConvNextConfig
    read_layers: int
    """Number of layers of the small encoder whose output is read."""
    grid: int
    """Number of tiles along each side, into which the picture is cut for the small encoder."""
    whole: bool
    """Whether the small encoder also encodes the whole picture, whose tokens come first."""

    def build(self, hidden_size: int) -> MgmTower:
        return MgmTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        small = [row for source in self._sources for row in clip_weights(source, "vision.small").items()]
        looks = {
            f"vlm_uni_{theirs}_projector.{number}": f"vision.{own}{part}"
            for theirs, own in (("query", "query"), ("aux", "key"), ("val", "value"))
            for number, part in ((0, "_norm"), (1, ""))
        }
        return {
            **dict(small),
            **convnext_weights(LARGE, "vision.large", len(self.large.sizes)),
            **looks,
            "mm_projector.0": "vision.projector_1",
            "mm_projector.2": "vision.projector_2",
        }

    @property
    def unused(self) -> Sequence[str]:
        names = ("post_layernorm", "embeddings.position_ids")
        return [f"{source}.{name}" for source in self._sources for name in names]

    @property
    def _sources(self) -> tuple[str, str]:
        return SMALL, f"{SMALL}.vision_model"


class MgmTower(VisionTower):
    def __init__(self, config: MgmConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, fine = config.small.hidden_size, sum(config.large.sizes)
        self.small = ClipEncoder(config.small)
        self.large = ConvNextEncoder(config.large)
        self.query_norm, self.query = LayerNorm(size, EPS), Dense(size, size)
        self.key_norm, self.key = LayerNorm(fine, EPS), Dense(fine, size)
        self.value_norm, self.value = LayerNorm(fine, EPS), Dense(fine, size)
        self.projector_1 = Dense(size, hidden_size)
        self.projector_2 = Dense(hidden_size, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        # One at a time, since the large encoder's cells have thousands of channels.
        device = self.query.weight.device
        return [self._features(upload(torch.from_numpy(image.pixels), device)) for image in images]

    def _features(self, pixels: Tensor) -> Tensor:
        """Encode pixels [1, 3, size, size] as [tokens, hidden]."""
        config, dtype = self.config, self.query.weight.dtype
        patches = self.small(self._tiles(pixels).to(dtype), config.read_layers)[:, 1:]
        x = patches + self._looked_up(patches, self._cells(pixels.to(dtype)))
        if config.whole:
            x = x.roll(1, 0)
        projected: Tensor = self.projector_2(F.gelu(self.projector_1(x)))
        return projected.flatten(0, 1)

    def _tiles(self, pixels: Tensor) -> Tensor:
        """Return the small encoder's pictures [pictures, 3, size, size], the whole last."""
        grid, side = self.config.grid, self.config.small.image_size
        picture = F.interpolate(pixels, (grid * side, grid * side), mode="bilinear")
        tiles = _tiled(picture, grid)
        if not self.config.whole:
            return tiles
        return torch.cat([tiles, F.interpolate(picture, (side, side), mode="bilinear")])

    def _cells(self, pixels: Tensor) -> Tensor:
        """Return the large encoder's cells at each patch of these pictures, [pictures, patches, cells, channels]."""
        grid, side = self.config.grid, self.config.small.side
        stages = self.large(pixels)
        shape = tuple(stages[0].shape[2:])
        rest = [F.interpolate(each.float(), shape, mode="bilinear").to(each.dtype) for each in stages[1:]]
        fine = torch.cat([stages[0], *rest], 1)
        pictures = _tiled(fine, grid)
        if self.config.whole:
            small = F.interpolate(fine.float(), scale_factor=1 / grid, mode="bilinear").to(fine.dtype)
            pictures = torch.cat([pictures, small])
        count, channels, size, _ = pictures.shape
        step = size // side
        squares = pictures.reshape(count, channels, side, step, side, step).permute(0, 2, 4, 3, 5, 1)
        return squares.reshape(count, side**2, step**2, channels)

    def _looked_up(self, patches: Tensor, cells: Tensor) -> Tensor:
        """Return the attention of each patch [pictures, patches, hidden] over its cells."""
        queries = self.query(self.query_norm(patches))[:, :, None]
        found = F.scaled_dot_product_attention(
            queries, self.key(self.key_norm(cells)), self.value(self.value_norm(cells))
        )
        return found.squeeze(2)


def _tiled(x: Tensor, grid: int) -> Tensor:
    """Cut x [1, channels, size, size] into tiles, row by row [grid * grid, channels, size / grid, size / grid]."""
    _, channels, height, width = x.shape
    cut = x.reshape(channels, grid, height // grid, grid, width // grid).permute(1, 3, 0, 2, 4)
    return cut.reshape(grid * grid, channels, height // grid, width // grid)
