"""The tower of PaddleOCR-VL (Cui et al., 2025): SigLIP over images of any size with interpolated learned and
two-dimensional rotary positions; squares of patches become a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs
from asyncllm.vl.towers.parts import PatchEmbedding, Table
from asyncllm.vl.towers.patches import PatchesConfig, stretched
from asyncllm.vl.towers.squares import PatchBlocks, SquareMerger, in_time, square_inputs, square_rotation

__all__ = ["PaddleOCRVLConfig", "PaddleOCRVLTower"]

MERGER_EPS = 1e-5


class PaddleOCRVLConfig(PatchesConfig, frozen=True, kw_only=True):
    eps: float
    side: int
    """Side of the square grid of learned positions, which is interpolated over an image."""

    def build(self, hidden_size: int) -> PaddleOCRVLTower:
        return PaddleOCRVLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        source = "visual.vision_model"
        block, own = f"{source}.encoder.layers.{{i}}", "vision.layers.{i}"
        rows = {
            f"{source}.embeddings.patch_embedding": "vision.patches",
            f"{source}.embeddings.position_embedding": "vision.positions",
            f"{block}.layer_norm1": f"{own}.attn_norm",
            **{f"{block}.self_attn.{name}_proj": f"{own}.qkv[{name}]" for name in "qkv"},
            f"{block}.self_attn.out_proj": f"{own}.out",
            f"{block}.layer_norm2": f"{own}.mlp_norm",
            f"{block}.mlp.fc1": f"{own}.up",
            f"{block}.mlp.fc2": f"{own}.down",
            f"{source}.post_layernorm": "vision.last_norm",
        }
        merger = {"pre_norm": "norm", "linear_1": "first", "linear_2": "second"}
        parts = ("mlp_AR", "projector")
        return rows | {f"{part}.{name}": f"vision.merger.{own}" for part in parts for name, own in merger.items()}

    @property
    def unused(self) -> Sequence[str]:
        return [f"visual.vision_model.{name}" for name in ("head", "embeddings.packing_position_embedding")]


class PaddleOCRVLTower(CapturableTower):
    def __init__(self, config: PaddleOCRVLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(config.side**2, size)
        self.layers = PatchBlocks(config, norm=LayerNorm, activation=config.activation, gated=False, eps=config.eps)
        self.last_norm = LayerNorm(size, config.eps)
        self.merger = SquareMerger(size, config.merge**2, hidden_size, eps=MERGER_EPS)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return square_inputs(images, self.config, self.positions.weight.device)

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        config = self.config
        (pixels, places, sizes), (whole,) = inputs
        x = self.patches(in_time(pixels, config.frames))
        x = x + stretched(self.positions(), places.flatten(0, 1), sizes, "bilinear").to(x.dtype)
        rotation = square_rotation(places, config.hidden_size // config.num_heads)
        features: Tensor = self.merger(self.last_norm(self.layers(x, rotation, whole)))
        return features
