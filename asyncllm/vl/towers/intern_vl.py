"""InternVL's tower (Chen et al., 2024): InternViT, squares of patches folded into one, and an MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerConfig, TowerInputs
from asyncllm.vl.towers.block import Attention, Block
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table, TowerActivation, fold_squares
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["InternVLConfig", "InternVLTower"]


class InternVLConfig(TowerConfig, frozen=True, kw_only=True):
    """A transformer over the square tiles of an image."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    read_layers: int
    """Number of layers whose output is read."""
    num_heads: int
    image_size: int
    patch_size: int
    eps: float
    activation: TowerActivation
    qkv_bias: bool
    qk_norm: bool
    rms_norm: bool
    fold: int
    """Patches along a side of the square that becomes a token."""
    transposed: bool = False
    """Whether tokens run down the columns (ps_version v1)."""

    @property
    def side(self) -> int:
        """Patches along each side of a tile."""
        return self.image_size // self.patch_size

    def build(self, hidden_size: int) -> InternVLTower:
        return InternVLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {**_NATIVE, **_REMOTE}


_NATIVE = {
    "vision_tower.embeddings.cls_token": "vision.class_token:weight",
    "vision_tower.embeddings.patch_embeddings.projection": "vision.patches",
    "vision_tower.embeddings.position_embeddings": "vision.positions:weight",
    "vision_tower.encoder.layer.{i}.layernorm_before": "vision.layers.{i}.attn_norm",
    "vision_tower.encoder.layer.{i}.attention.q_proj": "vision.layers.{i}.attn.qkv[q]",
    "vision_tower.encoder.layer.{i}.attention.k_proj": "vision.layers.{i}.attn.qkv[k]",
    "vision_tower.encoder.layer.{i}.attention.v_proj": "vision.layers.{i}.attn.qkv[v]",
    "vision_tower.encoder.layer.{i}.attention.q_norm": "vision.layers.{i}.attn.q_norm",
    "vision_tower.encoder.layer.{i}.attention.k_norm": "vision.layers.{i}.attn.k_norm",
    "vision_tower.encoder.layer.{i}.attention.projection_layer": "vision.layers.{i}.attn.out",
    "vision_tower.encoder.layer.{i}.lambda_1": "vision.layers.{i}.attn_scale:weight",
    "vision_tower.encoder.layer.{i}.layernorm_after": "vision.layers.{i}.mlp_norm",
    "vision_tower.encoder.layer.{i}.mlp.fc1": "vision.layers.{i}.up",
    "vision_tower.encoder.layer.{i}.mlp.fc2": "vision.layers.{i}.down",
    "vision_tower.encoder.layer.{i}.lambda_2": "vision.layers.{i}.mlp_scale:weight",
    "multi_modal_projector.layer_norm": "vision.norm",
    "multi_modal_projector.linear_1": "vision.projector_1",
    "multi_modal_projector.linear_2": "vision.projector_2",
}
"""The names in transformers' checkpoints."""

_REMOTE = {
    "vision_model.embeddings.class_embedding": "vision.class_token:weight",
    "vision_model.embeddings.patch_embedding": "vision.patches",
    "vision_model.embeddings.position_embedding": "vision.positions:weight",
    "vision_model.encoder.layers.{i}.norm1": "vision.layers.{i}.attn_norm",
    "vision_model.encoder.layers.{i}.attn.qkv": "vision.layers.{i}.attn.qkv[q+k+v]",
    "vision_model.encoder.layers.{i}.attn.q_norm": "vision.layers.{i}.attn.q_norm",
    "vision_model.encoder.layers.{i}.attn.k_norm": "vision.layers.{i}.attn.k_norm",
    "vision_model.encoder.layers.{i}.attn.proj": "vision.layers.{i}.attn.out",
    "vision_model.encoder.layers.{i}.ls1": "vision.layers.{i}.attn_scale:weight",
    "vision_model.encoder.layers.{i}.norm2": "vision.layers.{i}.mlp_norm",
    "vision_model.encoder.layers.{i}.mlp.fc1": "vision.layers.{i}.up",
    "vision_model.encoder.layers.{i}.mlp.fc2": "vision.layers.{i}.down",
    "vision_model.encoder.layers.{i}.ls2": "vision.layers.{i}.mlp_scale:weight",
    "mlp1.0": "vision.norm",
    "mlp1.1": "vision.projector_1",
    "mlp1.3": "vision.projector_2",
}
"""The names in the authors' checkpoints."""


class InternVLTower(CapturableTower):
    def __init__(self, config: InternVLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, folded = config.hidden_size, config.hidden_size * config.fold**2
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.class_token = Table(1, 1, size)
        self.positions = Table(1, config.side**2 + 1, size)
        self.layers = nn.ModuleList(self._block() for _ in range(config.num_layers))
        self.norm = LayerNorm(folded, 1e-5)
        self.projector_1 = Dense(folded, hidden_size)
        self.projector_2 = Dense(hidden_size, hidden_size)

    def _block(self) -> Block:
        config, size = self.config, self.config.hidden_size
        norms = (RMSNorm(size, 1e-6), RMSNorm(size, 1e-6)) if config.qk_norm else None
        return Block(
            Attention(size, config.num_heads, bias=config.qkv_bias, norms=norms),
            size,
            config.intermediate_size,
            activation=config.activation,
            eps=config.eps,
            norm_class=RMSNorm if config.rms_norm else LayerNorm,
            scaled=True,
        )

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return TowerInputs((upload_pixels(images, self.projector_1.weight),))

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N * tokens, hidden]."""
        (pixels,) = inputs.tensors
        x = self.patches.of_images(pixels)
        x = torch.cat([self.class_token().expand(len(x), -1, -1), x], 1) + self.positions()
        for layer in self.layers[: self.config.read_layers]:
            x = layer(x)
        folded = self.norm(self._folded(x[:, 1:])).flatten(0, 1)
        projected: Tensor = self.projector_2(F.gelu(self.projector_1(folded)))
        return projected

    def _folded(self, x: Tensor) -> Tensor:
        """Fold squares of patches into one, in the order of the config's ps_version."""
        squares, side = fold_squares(x, self.config.fold), self.config.side // self.config.fold
        if self.config.transposed:
            squares = squares.view(len(x), side, side, -1).transpose(1, 2).flatten(1, 2)
        return squares
