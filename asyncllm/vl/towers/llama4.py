"""The tower of Llama 4 (Meta, 2025): a transformer over tiles with learned and two-dimensional rotary positions and a
class token after the patches; squares of patches folded into one, an MLP and a projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels import Rotation, split_segments
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs
from asyncllm.vl.towers.parts import Dense, Table, cut, fold_squares
from asyncllm.vl.towers.patches import BlocksConfig
from asyncllm.vl.towers.squares import PatchBlocks, rotation_by
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["Llama4Tower", "Llama4TowerConfig"]

EPS = 1e-5


class Llama4TowerConfig(BlocksConfig, frozen=True, kw_only=True):
    """A transformer over the patches of square tiles and a projector."""

    projector_size: int
    image_size: int
    fold: int
    """Patches along a side of the square that becomes a token."""
    theta: float

    @property
    def side(self) -> int:
        """Patches along each side of a tile."""
        return self.image_size // self.patch_size

    def build(self, hidden_size: int) -> Llama4Tower:
        return Llama4Tower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        layer, own = "vision_model.model.layers.{i}", "vision.layers.{i}"
        return {
            "vision_model.patch_embedding.linear": "vision.patches",
            "vision_model.class_embedding": "vision.class_token:weight",
            "vision_model.positional_embedding_vlm": "vision.positions:weight",
            "vision_model.layernorm_pre": "vision.first_norm",
            "vision_model.layernorm_post": "vision.last_norm",
            f"{layer}.input_layernorm": f"{own}.attn_norm",
            **{f"{layer}.self_attn.{name}_proj": f"{own}.qkv[{name}]" for name in ("q", "k", "v")},
            f"{layer}.self_attn.o_proj": f"{own}.out",
            f"{layer}.post_attention_layernorm": f"{own}.mlp_norm",
            f"{layer}.mlp.fc1": f"{own}.up",
            f"{layer}.mlp.fc2": f"{own}.down",
            "vision_model.vision_adapter.mlp.fc1": "vision.adapter_1",
            "vision_model.vision_adapter.mlp.fc2": "vision.adapter_2",
            "multi_modal_projector.linear_1": "vision.projector",
        }


class Llama4Tower(CapturableTower):
    def __init__(self, config: Llama4TowerConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, config.projector_size
        self.patches = Dense(3 * config.patch_size**2, size, bias=False)
        self.class_token = Table(size)
        self.positions = Table(config.side**2 + 1, size)
        self.first_norm = LayerNorm(size, EPS)
        self.layers = PatchBlocks(config, norm=LayerNorm, activation="gelu", gated=False, eps=EPS, interleaved=True)
        self.last_norm = LayerNorm(size, EPS)
        self.adapter_1 = Dense(size * config.fold**2, width, bias=False)
        self.adapter_2 = Dense(width, width, bias=False)
        self.projector = Dense(width, hidden_size, bias=False)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return TowerInputs((upload_pixels(images, self.projector.weight),))

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N * tokens, hidden]."""
        (pixels,) = inputs.tensors
        x = self.patches(cut(pixels, self.config.patch_size))
        count, tokens = len(x), x.shape[1] + 1
        x = torch.cat([x, self.class_token().expand(count, 1, -1)], 1) + self.positions()
        x = self.first_norm(x).flatten(0, 1)
        rotation = self._rotation(count, pixels.device)
        tiles = split_segments([tokens] * count, pixels.device)
        x = self.last_norm(self.layers(x, rotation, tiles))
        x = fold_squares(x.view(count, tokens, -1)[:, :-1], self.config.fold)
        projected: Tensor = self.projector(F.gelu(self.adapter_2(F.gelu(self.adapter_1(x)))))
        return projected.flatten(0, 1)

    def _rotation(self, count: int, device: torch.device) -> Rotation:
        """Return the rotation of each token of `count` tiles: the first half of the pairs by the column, the second by
        the row, both counted from 1. Class tokens are not rotated."""
        config = self.config
        half = config.hidden_size // config.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
        steps = torch.arange(1, config.side + 1, dtype=torch.float32, device=device)[:, None] / config.theta**exponents
        turned = torch.cat([steps.repeat(config.side, 1), steps.repeat_interleave(config.side, 0)], -1)
        return rotation_by(torch.cat([turned, torch.zeros_like(turned[:1])]).repeat(count, 1))
