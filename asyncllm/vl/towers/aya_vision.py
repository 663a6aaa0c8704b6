"""The tower of Aya Vision (Dash et al., 2025) and Command A Vision: SigLIP over tiles, squares of patches folded into
one token each, and a gated MLP, which Aya Vision precedes with a norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerConfig, TowerInputs
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights
from asyncllm.vl.towers.parts import Dense, fold_squares
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["AyaVisionConfig", "AyaVisionTower"]


class AyaVisionConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and a projector."""

    encoder: ClipConfig
    read_layers: int
    """Number of layers whose output is read."""
    fold: int
    """Patches along a side of the square that becomes a token."""
    projector_size: int
    eps: float | None
    """Epsilon of the norm, or None without one."""

    def build(self, hidden_size: int) -> AyaVisionTower:
        return AyaVisionTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **clip_weights("vision_tower", "vision.encoder"),
            **clip_weights("vision_tower.vision_model", "vision.encoder"),
            "multi_modal_projector.layernorm": "vision.norm",
            "multi_modal_projector.linear_1": "vision.projector_1",
            "multi_modal_projector.linear_2": "vision.projector_2",
        }

    @property
    def unused(self) -> Sequence[str]:
        names = ("head",) if self.encoder.final_norm else ("post_layernorm", "head")
        return [f"{source}.{name}" for source in ("vision_tower", "vision_tower.vision_model") for name in names]


class AyaVisionTower(CapturableTower):
    def __init__(self, config: AyaVisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        folded = config.encoder.hidden_size * config.fold**2
        self.encoder = ClipEncoder(config.encoder)
        self.norm = None if config.eps is None else LayerNorm(folded, config.eps)
        self.projector_1 = Dense(folded, 2 * config.projector_size)
        self.projector_2 = Dense(config.projector_size, hidden_size)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return TowerInputs((upload_pixels(images, self.projector_1.weight),))

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N * tokens, hidden]."""
        x = self.encoder(inputs.tensors[0], self.config.read_layers)
        squares = fold_squares(x, self.config.fold).flatten(0, 1)
        up, gate = self.projector_1(squares if self.norm is None else self.norm(squares)).chunk(2, -1)
        projected: Tensor = self.projector_2(F.silu(gate) * up)
        return projected
