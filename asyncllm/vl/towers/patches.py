"""Configs of towers over images of any size, and the interpolation of their learned positions."""

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
    """Inner features of the blocks' MLPs."""
    num_layers: int
    num_heads: int
    patch_size: int


class PatchesConfig(BlocksConfig, frozen=True, kw_only=True):
    """A transformer over patches and the merger of squares of them."""

    frames: int
    """Number of frames that a patch spans. An image is repeated to as many equal frames."""
    merge: int
    """Patches along a side of the square that becomes a token."""
    activation: TowerActivation
    in_thinker: bool = False
    """Whether the model is the "thinker" of a Qwen-Omni, whose audio modules are left out."""

    @property
    def decoder_source(self) -> str:
        return "thinker" if self.in_thinker else super().decoder_source

    @property
    def unused(self) -> Sequence[str]:
        hears_and_speaks = ("audio_tower", "thinker.audio_tower", "talker", "token2wav", "code2wav")
        return hears_and_speaks if self.in_thinker else ()

    def placed(self, rows: Mapping[str, str]) -> Mapping[str, str]:
        """Return the rows of a weight table, and for a thinker also the same rows inside its module."""
        return {**rows, **{f"thinker.{row}": target for row, target in rows.items()}} if self.in_thinker else rows

    def trunk_weights(self, mlp: Mapping[str, str]) -> Mapping[str, str]:
        """Return the rows of a weight table for the patch embedding and the blocks. `mlp`: the linear layers of a
        block's MLP, from the checkpoint's names to targets."""
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
    """Return float32 positions of the patches [T, hidden], interpolated from a square grid of learned ones [side *
    side, hidden] that is stretched over each image. places and sizes [T, 2]: a patch's row and column, and its image's
    numbers of rows and columns. `corners`: whether the grid's outer points are aligned with the centres of the outer
    patches."""
    side = math.isqrt(len(learned))
    share = places / (sizes - 1).clamp(min=1) if corners else (places + 0.5) / sizes
    along = share * 2 - 1
    table = learned.float().view(side, side, -1).permute(2, 0, 1)[None]
    # grid_sample takes columns first.
    sampled = F.grid_sample(
        table, along.flip(-1)[None, :, None], mode=mode, align_corners=corners, padding_mode="border"
    )
    return sampled[0, :, :, 0].T
