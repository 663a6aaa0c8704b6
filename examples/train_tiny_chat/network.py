"""The Llama network of ``tiny-chat`` in plain PyTorch, with the tensor names that checkpoints use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the network."""

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    key_value_heads: int = 2
    head_size: int = 64
    intermediate: int = 768
    vocabulary: int = 2048
    positions: int = 2048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_value_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_value_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = self.shape
        query = self.q_proj(x).view(batch, length, shape.heads, shape.head_size).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, shape.key_value_heads, shape.head_size).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, shape.key_value_heads, shape.head_size).transpose(1, 2)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        groups = shape.heads // shape.key_value_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)


class Network(nn.Module):
    """The causal language model; its ``state_dict`` keys are those of a Llama checkpoint."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        frequency = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2).double() / shape.head_size)
        angle = torch.outer(torch.arange(shape.positions).double(), frequency).repeat(1, 2)
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)
        deep = 0.02 / (2 * shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns what the last layer makes of every position of ``tokens`` [batch, length]."""
        length = tokens.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        x: Tensor = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cosine, sine)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position of ``tokens`` [batch, length]."""
        return self.lm_head(self.model.norm(self.hidden(tokens)))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """The weighted next-token loss; ``weights`` [batch, length] weighs a token as a target."""
        return self.weighted_loss(self.hidden(tokens), tokens, weights)

    def weighted_loss(self, hidden: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """The loss from the last layer's output."""
        logits = self.lm_head(self.model.norm(hidden)).float()
        # The last position has no target: it predicts the first token with weight zero, which keeps the
        # shapes even.
        targets = tokens.roll(-1, 1).flatten()
        target_weights = weights.roll(-1, 1).clone()
        target_weights[:, -1] = 0.0
        losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        return (losses * target_weights.flatten()).sum() / target_weights.sum()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
