"""The tower of Qwen3-VL: Qwen2-VL's patches with learned positions as well, read after several layers.

Features of inner layers are added to the outputs of the decoder's first layers (DeepStack: Meng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs
from asyncllm.vl.towers.parts import PatchEmbedding, Table
from asyncllm.vl.towers.patches import PatchesConfig, stretched
from asyncllm.vl.towers.squares import EPS, PatchBlocks, SquareMerger, in_time, square_inputs, square_rotation

__all__ = ["Qwen3VLConfig", "Qwen3VLTower"]


class Qwen3VLConfig(PatchesConfig, frozen=True, kw_only=True):
    side: int
    """Side of the square grid of learned positions, which is interpolated over an image."""
    deep_layers: tuple[int, ...]
    """Layers whose outputs are added to those of the decoder's first layers, in this order."""

    def build(self, hidden_size: int) -> Qwen3VLTower:
        return Qwen3VLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        mergers = {"visual.merger": "vision.merger", "visual.deepstack_merger_list.{i}": "vision.deep_mergers.{i}"}
        names = {"norm": "norm", "linear_fc1": "first", "linear_fc2": "second"}
        if self.in_thinker:
            mergers = {"visual.merger": "vision.merger", "visual.merger_list.{i}": "vision.deep_mergers.{i}"}
            names = {"ln_q": "norm", "mlp.0": "first", "mlp.2": "second"}
        rows = {
            **self.trunk_weights({"linear_fc1": "up", "linear_fc2": "down"}),
            "visual.pos_embed": "vision.positions",
            **{f"{row}.{name}": f"{target}.{names[name]}" for row, target in mergers.items() for name in names},
        }
        return self.placed(rows)


class Qwen3VLTower(CapturableTower):
    """Returns features for the embeddings and for each of the decoder's first `num_deep` layers, concatenated."""

    def __init__(self, config: Qwen3VLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.num_deep = len(config.deep_layers)
        size, square = config.hidden_size, config.merge**2
        self.patches = PatchEmbedding((config.frames, config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(config.side**2, size)
        self.layers = PatchBlocks(config, norm=LayerNorm, activation=config.activation, gated=False, eps=EPS)
        self.merger = SquareMerger(size, square, hidden_size, eps=EPS)
        self.deep_mergers = nn.ModuleList(
            SquareMerger(size, square, hidden_size, eps=EPS, joined=True) for _ in config.deep_layers
        )

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return square_inputs(images, self.config, self.positions.weight.device)

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        config = self.config
        (pixels, places, sizes), (whole,) = inputs
        x = self.patches(in_time(pixels, config.frames))
        learned = stretched(self.positions(), places.flatten(0, 1), sizes, "bilinear", corners=True)
        x = x + learned.to(x.dtype)
        rotation = square_rotation(places, config.hidden_size // config.num_heads)
        deep: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, whole)
            if number in config.deep_layers:
                deep.append(self.deep_mergers[config.deep_layers.index(number)](x))
        return torch.cat([self.merger(x), *deep], -1)
