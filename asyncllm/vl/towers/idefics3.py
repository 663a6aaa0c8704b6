"""The tower of Idefics3 and SmolVLM (Laurençon et al., 2024): SigLIP, squares of patches folded into one, and a
projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerConfig, TowerInputs
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights, share_places
from asyncllm.vl.towers.parts import Dense, fold_squares
from asyncllm.vl.towers.uploads import upload, upload_pixels

__all__ = ["Idefics3TowerConfig", "Idefics3VisionTower"]


class Idefics3TowerConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and the folding of its patches."""

    encoder: ClipConfig
    fold: int
    """Patches along a side of the square that becomes a token."""

    def build(self, hidden_size: int) -> Idefics3VisionTower:
        return Idefics3VisionTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **clip_weights("vision_model", "vision.encoder"),
            "connector.modality_projection.proj": "vision.projector",
        }


class Idefics3VisionTower(CapturableTower):
    def __init__(self, config: Idefics3TowerConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClipEncoder(config.encoder)
        self.projector = Dense(config.encoder.hidden_size * config.fold**2, hidden_size, bias=False)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        weight = self.projector.weight
        return TowerInputs((upload_pixels(images, weight), upload(self._places(), weight.device)))

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        (pixels, places), encoder, fold = inputs.tensors, self.config.encoder, self.config.fold
        x = self.encoder(pixels, encoder.num_layers, places)
        squares = fold_squares(x, fold)
        projected: Tensor = self.projector(squares)
        return projected.flatten(0, 1)

    def _places(self) -> Tensor:
        """Return the index of each patch's learned position [side * side]."""
        side = self.config.encoder.side
        index = share_places(side, side)
        return (index[:, None] * side + index).flatten()
