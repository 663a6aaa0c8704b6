"""SAM's image encoder (Kirillov et al., 2023): most layers attend within windows, and scores have learned biases for
the distance of two patches in rows and in columns."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.vl.towers.block import JoinedQKV
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, PatchEmbedding, Table, TowerActivation

__all__ = ["Convolution", "SamConfig", "SamEncoder", "SamNeck", "neck_weights", "original_sam_weights", "sam_weights"]

NECK_EPS = 1e-6


class SamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer over the patches of large square pictures."""

    hidden_size: int
    intermediate_size: int
    output_channels: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    window: int
    """Patches along a side of a window."""
    global_layers: tuple[int, ...]
    """Layers that attend to the whole picture."""
    eps: float
    activation: TowerActivation
    qkv_bias: bool

    @property
    def side(self) -> int:
        """Patches along each side of a picture."""
        return self.image_size // self.patch_size


class SamEncoder(Layer):
    """Encodes pixels [N, 3, size, size] as the output of the first global layer [N, side, side, hidden], and that of
    the last layer after the neck [N, channels, side, side]. Learned positions and biases are interpolated for pictures
    of another size than the config's."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(1, config.side, config.side, size)
        self.layers = nn.ModuleList(
            _Block(config, None if number in config.global_layers else config.window)
            for number in range(config.num_layers)
        )
        self.neck = SamNeck(config)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        side, early = pixels.shape[-1] // self.config.patch_size, self.config.global_layers[0]
        positions = self.positions()
        if side != self.config.side:
            grid = positions.float().permute(0, 3, 1, 2)
            stretched = F.interpolate(grid, (side, side), mode="bicubic", antialias=True)
            positions = stretched.permute(0, 2, 3, 1).to(positions.dtype)
        x = self.patches.of_images(pixels).view(len(pixels), side, side, -1) + positions
        first = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == early:
                first = x
        return first, self.neck(x)


class SamNeck(Layer):
    """Maps x [N, side, side, hidden] to [N, channels, side, side] by two convolutions."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        channels = config.output_channels
        self.conv_1 = Convolution(config.hidden_size, channels, 1)
        self.norm_1 = LayerNorm(channels, NECK_EPS)
        self.conv_2 = Convolution(channels, channels, 3)
        self.norm_2 = LayerNorm(channels, NECK_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = _by_channel(self.norm_1, self.conv_1(x.permute(0, 3, 1, 2)))
        return _by_channel(self.norm_2, self.conv_2(x))


class _Block(Layer):
    """A pre-norm block over patches [N, side, side, hidden]. `window`: None for global attention."""

    def __init__(self, config: SamConfig, window: int | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.window = config.num_heads, window
        self.attn_norm, self.mlp_norm = LayerNorm(size, config.eps), LayerNorm(size, config.eps)
        self.qkv, self.out = JoinedQKV(size, 3 * size, bias=config.qkv_bias), Dense(size, size)
        distances = 2 * (window or config.side) - 1
        self.row_bias = Table(distances, size // config.num_heads)
        self.column_bias = Table(distances, size // config.num_heads)
        self.up, self.down = Dense(size, config.intermediate_size), Dense(config.intermediate_size, size)
        self._activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        x = x + (self._attended(h) if self.window is None else self._in_windows(h, self.window))
        x = x + self.down(self._activation(self.up(self.mlp_norm(x))))
        return x

    def _in_windows(self, x: Tensor, window: int) -> Tensor:
        """Attend within windows. The last windows are padded with zeros, which are attended to like other patches."""
        count, side = x.shape[:2]
        number = -(-side // window)
        more = number * window - side
        cut = F.pad(x, (0, 0, 0, more, 0, more)).view(count, number, window, number, window, -1).transpose(2, 3)
        out = self._attended(cut.flatten(0, 2)).view(count, number, number, window, window, -1).transpose(2, 3)
        return out.reshape(count, number * window, number * window, -1)[:, :side, :side]

    def _attended(self, x: Tensor) -> Tensor:
        """Return the attention of the patches of x [N, side, side, hidden] over each other, in x's shape."""
        count, side = x.shape[:2]
        qkv = self.qkv(x).view(count, side * side, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        squares = q.unflatten(2, (side, side))
        index = torch.arange(side, device=x.device)
        apart = index[:, None] - index + side - 1
        rows = torch.einsum("nhrcd,rkd->nhrck", squares, _for_side(self.row_bias(), side)[apart])
        columns = torch.einsum("nhrcd,ckd->nhrck", squares, _for_side(self.column_bias(), side)[apart])
        bias = (rows[..., :, None] + columns[..., None, :]).reshape(count, self.num_heads, side * side, side * side)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(count, side, side, -1))
        return out


def _for_side(learned: Tensor, side: int) -> Tensor:
    """Interpolate learned biases of distances [D, size] for `side` patches along a side [2 * side - 1, size]."""
    if len(learned) == 2 * side - 1:
        return learned
    stretched = F.interpolate(learned.float().T[None], 2 * side - 1, mode="linear")
    return stretched[0].T.to(learned.dtype)


class Convolution(Table):
    """A convolution from [N, in, height, width] to [N, out, height / stride, width / stride], with an odd window, zero
    padding and no bias."""

    def __init__(self, in_channels: int, out_channels: int, window: int, *, stride: int = 1) -> None:
        super().__init__(out_channels, in_channels, window, window)
        self._stride = stride

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        window, sides = self.weight.shape[-1], [-(-side // self._stride) for side in x.shape[2:]]
        # A matrix product keeps float32, which cuDNN's convolutions round to TF32 unless a process-wide flag is set.
        columns = F.unfold(x, window, padding=window // 2, stride=self._stride)
        out: Tensor = (self.weight.flatten(1) @ columns).view(len(x), -1, *sides)
        return out


def sam_weights(source: str, target: str) -> Mapping[str, str]:
    """Return the rows of a weight table from the checkpoint's module `source` to the encoder at `target`."""
    layer, own = f"{source}.layers.{{i}}", f"{target}.layers.{{i}}"
    return {
        f"{source}.patch_embed.projection": f"{target}.patches",
        f"{source}.pos_embed": f"{target}.positions:weight",
        f"{layer}.layer_norm1": f"{own}.attn_norm",
        f"{layer}.attn.qkv": f"{own}.qkv[q+k+v]",
        f"{layer}.attn.proj": f"{own}.out",
        f"{layer}.attn.rel_pos_h": f"{own}.row_bias:weight",
        f"{layer}.attn.rel_pos_w": f"{own}.column_bias:weight",
        f"{layer}.layer_norm2": f"{own}.mlp_norm",
        f"{layer}.mlp.lin1": f"{own}.up",
        f"{layer}.mlp.lin2": f"{own}.down",
        **neck_weights(f"{source}.neck", f"{target}.neck"),
    }


def original_sam_weights(source: str, target: str, early_neck: str | None = None) -> Mapping[str, str]:
    """Return the rows as `sam_weights` under the names of DeepSeek's authors. `early_neck`: the target of DeepSeek-VL's
    second neck."""
    block, own = f"{source}.blocks.{{i}}", f"{target}.layers.{{i}}"
    necks = {"neck": f"{target}.neck"} | ({} if early_neck is None else {"neck_hd": early_neck})
    inner = {"0": "conv_1", "1": "norm_1", "2": "conv_2", "3": "norm_2"}
    return {
        f"{source}.patch_embed.proj": f"{target}.patches",
        f"{source}.pos_embed": f"{target}.positions:weight",
        f"{block}.norm1": f"{own}.attn_norm",
        f"{block}.attn.qkv": f"{own}.qkv[q+k+v]",
        f"{block}.attn.proj": f"{own}.out",
        f"{block}.attn.rel_pos_h": f"{own}.row_bias:weight",
        f"{block}.attn.rel_pos_w": f"{own}.column_bias:weight",
        f"{block}.norm2": f"{own}.mlp_norm",
        f"{block}.mlp.lin1": f"{own}.up",
        f"{block}.mlp.lin2": f"{own}.down",
        **{f"{source}.{neck}.{n}": f"{at}.{name}" for neck, at in necks.items() for n, name in inner.items()},
    }


def neck_weights(source: str, target: str) -> Mapping[str, str]:
    """Return the rows of a weight table from the checkpoint's module `source` to the neck at `target`."""
    names = {"conv": "conv_", "layer_norm": "norm_"}
    return {f"{source}.{name}{n}": f"{target}.{own}{n}" for name, own in names.items() for n in (1, 2)}


def _by_channel(norm: LayerNorm, x: Tensor) -> Tensor:
    """Normalize x [N, channels, height, width] over its channels."""
    normed: Tensor = norm(x.permute(0, 2, 3, 1).contiguous())
    return normed.permute(0, 3, 1, 2)
