"""CLIP's and SigLIP's vision transformers (Radford et al., 2021; Zhai et al., 2023), as used by LLaVA and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.vl.towers.block import Attention, Block
from asyncllm.vl.towers.parts import PatchEmbedding, Table, TowerActivation

__all__ = ["ClipConfig", "ClipEncoder", "ColoursLast", "clip_weights", "share_places", "timm_weights"]


class ClipConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer over the patches of square pictures."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    eps: float
    activation: TowerActivation
    final_norm: bool = False
    """Whether a norm follows the last layer, for towers that read its output."""
    has_class_token: bool = True
    """Whether a class token precedes the patches and a norm follows the embeddings, as in CLIP. SigLIP has neither, but
    its patch embedding has a bias."""
    stacked_positions: bool = False
    """Whether the checkpoint stores positions as [1, tokens, hidden], as timm does."""

    @property
    def side(self) -> int:
        """Patches along each side of a picture."""
        return self.image_size // self.patch_size


class ClipEncoder(Layer):
    """A vision transformer, of which the output of any layer can be read."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        size, own = config.hidden_size, config.has_class_token
        self.config = config
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=not own)
        self.class_token = Table(size) if own else None
        leading = (1,) if config.stacked_positions else ()
        self.positions = Table(*leading, config.side**2 + own, size)
        self.first_norm = LayerNorm(size, config.eps) if own else None
        self.layers = nn.ModuleList(
            Block(
                Attention(size, config.num_heads),
                size,
                config.intermediate_size,
                activation=config.activation,
                eps=config.eps,
            )
            for _ in range(config.num_layers)
        )
        self.last_norm = LayerNorm(size, config.eps) if config.final_norm else None

    def forward(
        self, pixels: Tensor, num_layers: int, places: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [N, tokens, hidden] of pixels [N, 3, size, size] after `num_layers` layers, the
        class token first. `places` [tokens] or [N, tokens]: the index of each token's learned position, if not its own.
        `mask` [N, tokens] bool: the tokens to attend to, if not all."""
        return self._read(self.patches.of_images(pixels), [num_layers], self._places(places), mask)[0]

    def several(self, pixels: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return the hidden states as `forward` after each of several numbers of layers."""
        return self._read(self.patches.of_images(pixels), counts, self.positions())

    def of_patches(
        self, patches: Tensor, num_layers: int, places: Tensor | None = None, *, positions: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states as `forward` for patches [N, tokens, 3 * patch * patch]. `positions`
        [tokens, hidden]: a replacement for the learned ones."""
        own = self._places(places) if positions is None else positions
        return self._read(self.patches(patches), [num_layers], own)[0]

    def of_embedded(self, x: Tensor, num_layers: int, positions: Tensor) -> Tensor:
        """Return the hidden states as `forward` for embeddings x [N, tokens, hidden] in place of embedded patches, with
        positions [1 + tokens, hidden]."""
        return self._read(x, [num_layers], positions)[0]

    def _places(self, places: Tensor | None) -> Tensor:
        learned: Tensor = self.positions()
        return learned if places is None else learned[places]

    def _read(self, x: Tensor, counts: Sequence[int], positions: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        if self.class_token is not None:
            x = torch.cat([self.class_token().expand(len(x), 1, -1), x], 1)
        x = x + positions
        if self.first_norm is not None:
            x = self.first_norm(x)
        found = {0: x}
        for number, layer in enumerate(self.layers[: max(counts)], 1):
            x = layer(x) if mask is None else layer.masked(x, mask)  # type: ignore[operator]
            if number in counts:
                found[number] = x
        if self.last_norm is not None and len(self.layers) in found:
            found[len(self.layers)] = self.last_norm(x)
        return [found[count] for count in counts]


class ColoursLast(PatchEmbedding):
    """A patch embedding whose checkpoint orders a patch's numbers by pixel, with the colours last."""

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {**super().expected_parts(), ("weight", None, None): (len(self.weight), self.weight[0].numel())}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if suffix != "weight":
            return super().load_part(suffix, part, index, tensor)
        out, colours, *window = self.weight.shape
        self.weight.copy_(tensor.view(out, *window, colours).permute(0, 3, 1, 2))
        return None


def share_places(count: int, side: int) -> Tensor:
    """Return the index, among `side` learned positions along an axis, of each of `count` patches, padded to `side`
    indices. The position is that at a patch's share of the picture's side in float32, whose rounding shifts some
    patches by one, as in training."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    shares = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(shares, edges, right=True)


def clip_weights(source: str, target: str) -> Mapping[str, str]:
    """Return the rows of a weight table from the checkpoint's module `source` to the encoder at `target`."""
    layer, own = f"{source}.encoder.layers.{{i}}", f"{target}.layers.{{i}}"
    return {
        f"{source}.embeddings.class_embedding": f"{target}.class_token:weight",
        f"{source}.embeddings.patch_embedding": f"{target}.patches",
        f"{source}.embeddings.position_embedding": f"{target}.positions",
        f"{source}.pre_layrnorm": f"{target}.first_norm",
        f"{source}.post_layernorm": f"{target}.last_norm",
        f"{layer}.layer_norm1": f"{own}.attn_norm",
        **{f"{layer}.self_attn.{name}_proj": f"{own}.attn.qkv[{name}]" for name in ("q", "k", "v")},
        **{f"{layer}.self_attn.{name}": f"{own}.attn.out" for name in ("out_proj", "projection_layer")},
        f"{layer}.layer_norm2": f"{own}.mlp_norm",
        f"{layer}.mlp.fc1": f"{own}.up",
        f"{layer}.mlp.fc2": f"{own}.down",
    }


def timm_weights(source: str, target: str) -> Mapping[str, str]:
    """Return the rows as `clip_weights` for an encoder under timm's names (DeepSeek-VL)."""
    block, own = f"{source}.blocks.{{i}}", f"{target}.layers.{{i}}"
    return {
        f"{source}.patch_embed.proj": f"{target}.patches",
        f"{source}.pos_embed": f"{target}.positions:weight",
        f"{block}.norm1": f"{own}.attn_norm",
        f"{block}.attn.qkv": f"{own}.attn.qkv[q+k+v]",
        f"{block}.attn.proj": f"{own}.attn.out",
        f"{block}.norm2": f"{own}.mlp_norm",
        f"{block}.mlp.fc1": f"{own}.up",
        f"{block}.mlp.fc2": f"{own}.down",
        f"{source}.norm": f"{target}.last_norm",
    }
