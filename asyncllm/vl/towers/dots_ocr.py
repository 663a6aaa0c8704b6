"""The tower of dots.ocr (rednote-hilab, 2025): a transformer over images of any size with two-dimensional rotary
positions; squares of patches become a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from asyncllm.layers.norm import RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs
from asyncllm.vl.towers.parts import PatchEmbedding
from asyncllm.vl.towers.patches import PatchesConfig
from asyncllm.vl.towers.squares import PatchBlocks, SquareMerger, in_time, square_inputs, square_rotation

__all__ = ["DotsConfig", "DotsTower"]

MERGER_EPS = 1e-6


class DotsConfig(PatchesConfig, frozen=True, kw_only=True):
    eps: float
    bias: bool
    """Whether the blocks' linear layers have biases."""
    last_norm: bool
    """Whether a norm follows the last block."""

    def build(self, hidden_size: int) -> DotsTower:
        return DotsTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        block, own = "vision_tower.blocks.{i}", "vision.layers.{i}"
        return {
            "vision_tower.patch_embed.patchifier.proj": "vision.patches",
            "vision_tower.patch_embed.patchifier.norm": "vision.first_norm",
            f"{block}.norm1": f"{own}.attn_norm",
            f"{block}.norm2": f"{own}.mlp_norm",
            f"{block}.attn.qkv": f"{own}.qkv[q+k+v]",
            f"{block}.attn.proj": f"{own}.out",
            f"{block}.mlp.fc1": f"{own}.mlp.gate_up[gate]",
            f"{block}.mlp.fc3": f"{own}.mlp.gate_up[up]",
            f"{block}.mlp.fc2": f"{own}.mlp.down",
            "vision_tower.post_trunk_norm": "vision.last_norm",
            "vision_tower.merger.ln_q": "vision.merger.norm",
            "vision_tower.merger.mlp.0": "vision.merger.first",
            "vision_tower.merger.mlp.2": "vision.merger.second",
        }


class DotsTower(CapturableTower):
    def __init__(self, config: DotsConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.first_norm = RMSNorm(size, config.eps)
        self.layers = PatchBlocks(
            config, norm=RMSNorm, activation=config.activation, gated=True, bias=config.bias, eps=config.eps
        )
        self.last_norm = RMSNorm(size, config.eps) if config.last_norm else None
        self.merger = SquareMerger(size, config.merge**2, hidden_size, eps=MERGER_EPS)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return square_inputs(images, self.config, self.merger.first.weight.device)

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        config = self.config
        (pixels, places, _), (whole,) = inputs
        x = self.first_norm(self.patches(in_time(pixels, config.frames)))
        x = self.layers(x, square_rotation(places, config.hidden_size // config.num_heads), whole)
        features: Tensor = self.merger(x if self.last_norm is None else self.last_norm(x))
        return features
