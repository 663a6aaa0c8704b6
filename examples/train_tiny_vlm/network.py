"""The LLaVA network of ``tiny-vlm`` in plain PyTorch, with the tensor names that checkpoints use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_tiny_chat.network import Network as TextNetwork
from train_tiny_chat.network import Shape as TextShape

from .scenes import SIDE


@dataclass(frozen=True)
class TowerShape:
    """The sizes of the vision tower."""

    hidden: int = 192
    layers: int = 4
    heads: int = 3
    intermediate: int = 576
    image: int = SIDE
    patch: int = 14
    norm_epsilon: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens that an image becomes."""
        return (self.image // self.patch) ** 2


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _FeedForward(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden, shape.intermediate)
        self.fc2 = nn.Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        return self.fc2(inner * torch.sigmoid(1.702 * inner))  # type: ignore[no-any-return]


class TowerBlock(nn.Module):
    """One layer of the tower."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = _Attention(shape)
        self.layer_norm2 = nn.LayerNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = _FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class _Embeddings(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(0.02 * torch.randn(shape.hidden))
        self.patch_embedding = nn.Conv2d(3, shape.hidden, shape.patch, shape.patch, bias=False)
        self.position_embedding = nn.Embedding(shape.tokens + 1, shape.hidden)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        return torch.cat([first, patches], 1) + self.position_embedding.weight


class _Encoder(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TowerBlock(shape) for _ in range(shape.layers))


class _VisionModel(nn.Module):
    """CLIP's vision transformer, read after its last layer. Nothing reads ``post_layernorm``, which the layout has."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.embeddings = _Embeddings(shape)
        self.pre_layrnorm = nn.LayerNorm(shape.hidden, shape.norm_epsilon)
        self.encoder = _Encoder(shape)
        self.post_layernorm = nn.LayerNorm(shape.hidden, shape.norm_epsilon).requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.pre_layrnorm(self.embeddings(pixels))
        for layer in self.encoder.layers:
            x = layer(x)
        return x[:, 1:]  # type: ignore[no-any-return]


class _Tower(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.vision_model = _VisionModel(shape)


class _Projector(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))  # type: ignore[no-any-return]


class VisionNetwork(nn.Module):
    """A tower, a projector and the text network; the ``state_dict`` keys are those of a LLaVA checkpoint."""

    def __init__(self, tower: TowerShape, text: TextShape, image_token: int) -> None:
        super().__init__()
        self.tower_shape, self.image_token = tower, image_token
        self.vision_tower = _Tower(tower)
        self.multi_modal_projector = _Projector(tower.hidden, text.hidden)
        self.language_model = TextNetwork(text)
        for name, parameter in (*self.vision_tower.named_parameters(), *self.multi_modal_projector.named_parameters()):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def hidden(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """Returns what the last layer makes of ``tokens`` [batch, length], whose image tokens stand for ``pixels``
        [images, 3, side, side] in their order."""
        text = self.language_model
        x = text.model.embed_tokens(tokens)
        if len(pixels):
            features = self.multi_modal_projector(self.vision_tower.vision_model(pixels))
            x = x.masked_scatter((tokens == self.image_token)[..., None], features.flatten(0, 1).to(x.dtype))
        length = tokens.shape[1]
        cosine, sine = text.cosine[:length], text.sine[:length]
        for layer in text.model.layers:
            x = layer(x, cosine, sine)
        return x  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """Returns the logits of every position."""
        text = self.language_model
        return text.lm_head(text.model.norm(self.hidden(tokens, pixels)))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, weights: Tensor, pixels: Tensor) -> Tensor:
        """The weighted next-token loss; ``weights`` [batch, length] weighs a token as a target."""
        return self.language_model.weighted_loss(self.hidden(tokens, pixels), tokens, weights)
