"""The tower of Gemma 4: a transformer over images of any size with learned and two-dimensional rotary positions; means
of squares of patches become tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import Rotation, Segments, split_segments
from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.unit_norm import UnitNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import VisionTower
from asyncllm.vl.towers.clip import ColoursLast
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, Table, TowerActivation, empty
from asyncllm.vl.towers.patches import BlocksConfig
from asyncllm.vl.towers.squares import rotation_by, square_places
from asyncllm.vl.towers.uploads import upload, upload_pixels

__all__ = ["Gemma4TowerConfig", "Gemma4VisionTower"]

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Gemma4TowerConfig(BlocksConfig, frozen=True, kw_only=True):
    """A transformer over patches and the pooling of its patches."""

    num_kv_heads: int
    head_dim: int
    pool: int
    """Patches along a side of the square that is averaged to a token."""
    places: int
    """Number of learned positions along an axis."""
    theta: float
    activation: TowerActivation
    eps: float
    clipped: bool
    """Whether inputs and outputs of linear layers are clamped to bounds in the checkpoint."""
    standardized: bool
    """Whether the means are shifted and scaled by numbers in the checkpoint."""

    def build(self, hidden_size: int) -> Gemma4VisionTower:
        return Gemma4VisionTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        block, own = "vision_tower.encoder.layers.{i}", "vision.layers.{i}"
        products = {
            f"self_attn.{theirs}_proj": name for theirs, name in zip("qkvo", ("q", "k", "v", "out"), strict=True)
        }
        products |= {f"mlp.{name}_proj": name for name in ("gate", "up", "down")}
        norms = {
            "self_attn.q_norm": "q_norm",
            "self_attn.k_norm": "k_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "attn_after",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_after",
        }
        return {
            "vision_tower.patch_embedder.input_proj": "vision.patches",
            "vision_tower.patch_embedder.position_embedding_table": "vision.positions:weight",
            **{f"{block}.{theirs}.linear": f"{own}.{name}" for theirs, name in products.items()},
            **{
                f"{block}.{theirs}.{bound}": f"{own}.{name}:{bound}"
                for theirs, name in products.items()
                for bound in _BOUNDS
                if self.clipped
            },
            **{f"{block}.{theirs}": f"{own}.{name}" for theirs, name in norms.items()},
            **{
                f"vision_tower.std_{name}": f"vision.standard:{name}" for name in ("bias", "scale") if self.standardized
            },
            "embed_vision.embedding_projection": "vision.projection",
        }


class _ClippedDense(Dense):
    """A linear layer whose inputs and outputs are clamped."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.input_min, self.input_max, self.output_min, self.output_max = (empty() for _ in _BOUNDS)

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward(torch.clamp(x, self.input_min, self.input_max))
        return torch.clamp(inner, self.output_min, self.output_max)


class _Standard(ParameterOwner):
    """Shifts and scales features in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias, self.scale = empty(size), empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.bias.float()) * self.scale.float()


class _Block(Layer):
    """Attention and a gated MLP, each with a norm before and after it. Queries, keys and values are normalized per
    head."""

    def __init__(self, config: Gemma4TowerConfig) -> None:
        super().__init__()
        size, eps, head = config.hidden_size, config.eps, config.head_dim
        self.head_dim, self.num_heads, self.num_kv_heads = head, config.num_heads, config.num_kv_heads
        self.attn_norm, self.attn_after, self.mlp_norm, self.mlp_after = (RMSNorm(size, eps) for _ in range(4))
        self.q_norm, self.k_norm, self.v_norm = RMSNorm(head, eps), RMSNorm(head, eps), UnitNorm(head, eps)

        def product(reads: int, gives: int) -> Dense:
            return _ClippedDense(reads, gives) if config.clipped else Dense(reads, gives, bias=False)

        self.q, self.out = product(size, config.num_heads * head), product(config.num_heads * head, size)
        self.k, self.v = (product(size, config.num_kv_heads * head) for _ in range(2))
        self.gate, self.up = (product(size, config.intermediate_size) for _ in range(2))
        self.down = product(config.intermediate_size, size)
        self._activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (each(h).unflatten(-1, (-1, self.head_dim)) for each in (self.q, self.k, self.v))
        # Gemma 4 does not scale scores, so this cancels the op's scale.
        q = _paired(self.q_norm(q)) * self.head_dim**0.5
        k, v = _paired(self.k_norm(k)), self.v_norm(v)
        q, k = kernels.apply_rotary(q, rotation), kernels.apply_rotary(k, rotation)
        if self.num_kv_heads != self.num_heads:
            k, v = (each.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for each in (k, v))
        x = x + self.attn_after(self.out(kernels.segment_attention(q, k, v, segments).flatten(1)))
        h = self.mlp_norm(x)
        moved: Tensor = self.mlp_after(self.down(self._activation(self.gate(h)) * self.up(h)))
        return x + moved


def _paired(heads: Tensor) -> Tensor:
    """Reorder the features of heads [T, H, D] so that those rotated together are half a head apart. In the checkpoint
    each axis has half of a head, and the halves of that are rotated together."""
    halves = heads.view(*heads.shape[:-1], 2, 2, -1)
    return halves.transpose(-3, -2).flatten(-3)


class Gemma4VisionTower(VisionTower):
    def __init__(self, config: Gemma4TowerConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = ColoursLast((config.patch_size, config.patch_size), size, bias=False)
        self.positions = Table(2, config.places, size)
        self.layers = torch.nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.standard = _Standard(size) if config.standardized else None
        self.norm = UnitNorm(size, config.eps)
        self.projection = Dense(size, hidden_size, bias=False)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight, pool = self.projection.weight, self.config.pool
        grids = [(rows // pool, columns // pool) for image in images for rows, columns in image.pictures]
        lengths = [rows * columns * pool**2 for rows, columns in grids]
        places = upload(square_places(grids, pool).flatten(0, 1), weight.device)
        pixels = 2 * (upload_pixels(images, weight).flatten(1) - 0.5)
        along, down = self.positions()
        x = self.patches(pixels) + (along[places[:, 1]] + down[places[:, 0]])
        rotation, segments = self._rotation(places), split_segments(lengths, weight.device)
        for block in self.layers:
            x = block(x, rotation, segments)
        means = x.float().unflatten(0, (-1, pool**2)).mean(1).to(x.dtype)
        tokens = means.float() * self.config.hidden_size**0.5
        if self.standard is not None:
            tokens = self.standard(tokens)
        features = self.projection(self.norm(tokens.to(x.dtype)))
        return list(torch.split(features, [image.num_features for image in images]))

    def _rotation(self, places: Tensor) -> Rotation:
        """Return the rotation of patches at these rows and columns [T, 2]: the first half of the pairs by the column,
        the second by the row."""
        half = self.config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half
        return rotation_by((places.flip(-1)[..., None].float() / self.config.theta**exponents).flatten(1))
