"""The tower of GLM-4.1V (GLM-V Team, 2025): Qwen2-VL's patches with interpolated learned positions, squares of them
folded by a convolution, and a gated projector. GLM-OCR normalizes queries and keys instead of having learned
positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs
from asyncllm.vl.towers.block import GATED
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, PatchEmbedding, Table
from asyncllm.vl.towers.patches import PatchesConfig, stretched
from asyncllm.vl.towers.squares import PatchBlocks, in_time, square_inputs, square_rotation

__all__ = ["Glm4vConfig", "Glm4vTower"]


class Glm4vConfig(PatchesConfig, frozen=True, kw_only=True):
    merger_size: int
    """Inner features of the projector."""
    eps: float
    side: int | None
    """Side of the square grid of learned positions, which is interpolated over an image, or None for norms of queries
    and keys instead (GLM-OCR)."""
    bias: bool = False
    """Whether the blocks' linear layers have biases."""

    def build(self, hidden_size: int) -> Glm4vTower:
        return Glm4vTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        names = {f"{name}_proj": name for name in GATED}
        return {
            **self.trunk_weights({theirs: GATED[name] for theirs, name in names.items()}),
            "visual.post_conv_layernorm": "vision.first_norm",
            "visual.embeddings.position_embedding": "vision.positions",
            **{f"visual.blocks.{{i}}.attn.{name}_norm": f"vision.layers.{{i}}.{name}_norm" for name in ("q", "k")},
            "visual.post_layernorm": "vision.last_norm",
            "visual.downsample": "vision.fold",
            "visual.merger.proj": "vision.projector",
            "visual.merger.post_projection_norm": "vision.projector_norm",
            **{f"visual.merger.{theirs}": f"vision.{name}" for theirs, name in names.items()},
        }


class Glm4vTower(CapturableTower):
    def __init__(self, config: Glm4vConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding((config.frames, config.patch_size, config.patch_size), size, bias=True)
        self.first_norm = None if config.side is None else RMSNorm(size, config.eps)
        self.positions = None if config.side is None else Table(config.side**2, size)
        self.last_norm = RMSNorm(size, config.eps)
        self.layers = PatchBlocks(
            config,
            norm=RMSNorm,
            activation=config.activation,
            gated=True,
            bias=config.bias,
            eps=config.eps,
            head_norms=config.side is None,
        )
        self.fold = PatchEmbedding((config.merge, config.merge), hidden_size, bias=True, channels=size)
        self.projector = Dense(hidden_size, hidden_size, bias=False)
        self.projector_norm = LayerNorm(hidden_size, 1e-5)
        self.gate = Dense(hidden_size, config.merger_size, bias=False)
        self.up = Dense(hidden_size, config.merger_size, bias=False)
        self.down = Dense(config.merger_size, hidden_size, bias=False)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return square_inputs(images, self.config, self.projector.weight.device)

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        config, square = self.config, self.config.merge**2
        (pixels, places, sizes), (whole,) = inputs
        x = self.patches(in_time(pixels, config.frames))
        if self.first_norm is not None and self.positions is not None:
            x = self.first_norm(x)
            x = x + stretched(self.positions(), places.flatten(0, 1), sizes, "bicubic").to(x.dtype)
        rotation = square_rotation(places, config.hidden_size // config.num_heads)
        x = self.last_norm(self.layers(x, rotation, whole))
        folded = self.fold(x.view(-1, square, config.hidden_size).transpose(1, 2).flatten(1))
        x = F.gelu(self.projector_norm(self.projector(folded)))
        features: Tensor = self.down(ACTIVATIONS[config.activation](self.gate(x)) * self.up(x))
        return features
