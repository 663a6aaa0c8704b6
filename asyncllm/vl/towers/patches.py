"""The configs of towers over patches of images of any size, and positions that are stretched over these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from asyncllm.vl.tower import TowerConfig
from asyncllm.vl.towers.parts import TowerActivation

__all__ = ["BlocksConfig", "PatchesConfig", "stretched"]


class BlocksConfig(TowerConfig, frozen=True, kw_only=True):
    """A transformer over patches."""

    hidden_size: int
    intermediate_size: int
    """Of the blocks' MLPs."""
    num_layers: int
    num_heads: int
    patch_size: int


class PatchesConfig(BlocksConfig, frozen=True, kw_only=True):
    """A transformer over patches, and the merger of squares of them."""

    frames: int
    """Of a patch; an image is as many equal ones."""
    merge: int
    """Patches along a side of the square that becomes a token."""
    activation: TowerActivation
    in_thinker: bool = False
    """Whether this is a part of a model that hears and speaks besides, whose parts for that are left out
    (Qwen-Omni)."""

    @property
    def decoder_source(self) -> str:
        return "thinker" if self.in_thinker else super().decoder_source

    @property
    def unused(self) -> Sequence[str]:
        hears_and_speaks = ("audio_tower", "thinker.audio_tower", "talker", "token2wav", "code2wav")
        return hears_and_speaks if self.in_thinker else ()

    def placed(self, rows: Mapping[str, str]) -> Mapping[str, str]:
        """Return the rows of a weight table with those of the same modules within the part that thinks."""
        return {**rows, **{f"thinker.{row}": target for row, target in rows.items()}} if self.in_thinker else rows

    def trunk_weights(self, mlp: Mapping[str, str]) -> Mapping[str, str]:
        """Return the rows of the patches' embedding and of the blocks. `mlp`: a block's products in the checkpoint,
        and ours."""
        block, own = "visual.blocks.{i}", "vision.layers.{i}"
        return {
            "visual.patch_embed.proj": "vision.patches",
            f"{block}.norm1": f"{own}.attn_norm",
            f"{block}.norm2": f"{own}.mlp_norm",
            f"{block}.attn.qkv": f"{own}.qkv[q+k+v]",
            **{f"{block}.attn.{name}": f"{own}.qkv[{name}]" for name in "qkv"},
            f"{block}.attn.proj": f"{own}.out",
            **{f"{block}.mlp.{theirs}": f"{own}.{name}" for theirs, name in mlp.items()},
        }


def stretched(
    learned: Tensor, places: Tensor, sizes: Tensor, mode: Literal["bicubic", "bilinear"], *, corners: bool = False
) -> Tensor:
    """Return positions of the patches [T, hidden], by interpolation in the stretched grid of learned ones [side *
    side, hidden]. places and sizes [T, 2]: a patch's row and column, and how many patches its image has along them.
    `corners`: the grid's outer points lie in the middle of the outer patches, and not of its own cells."""
    side = math.isqrt(len(learned))
    share = places / (sizes - 1).clamp(min=1) if corners else (places + 0.5) / sizes
    along = share * 2 - 1
    table = learned.float().view(side, side, -1).permute(2, 0, 1)[None]
    # Columns come first.
    sampled = F.grid_sample(
        table, along.flip(-1)[None, :, None], mode=mode, align_corners=corners, padding_mode="border"
    )
    return sampled[0, :, :, 0].T
